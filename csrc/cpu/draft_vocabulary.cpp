#include "draft_vocabulary.h"

#include <algorithm>
#include <cstring>

namespace ppsd {

DraftVocabulary::DraftVocabulary(const Kernels& kernels, const std::vector<int>& listed, const Tensor& lm_head, Format format)
    : kernels_(&kernels),
      lm_head_(lm_head),
      follows_(lm_head.present()),
      size_(int(listed.size())),
      ids_(listed),
      own_{format, 0, int(lm_head.columns)} {}

void DraftVocabulary::follow(const std::vector<int>& text) {
  if (!follows_) return;
  std::vector<std::pair<int, int>> fresh;   // (id, its last position), newest first
  for (int position = int(text.size()) - 1; position >= followed_ && int(fresh.size()) < kMost; --position) {
    const int id = text[size_t(position)];
    if (std::binary_search(ids_.begin(), ids_.begin() + listed(), id)) continue;
    if (const auto place = place_of(id); place != places_.end()) {
      last_[size_t(place->second)] = std::max(last_[size_t(place->second)], position);
    } else if (std::none_of(fresh.begin(), fresh.end(), [id](const auto& known) { return known.first == id; })) {
      fresh.emplace_back(id, position);
    }
  }
  followed_ = int(text.size());
  for (auto next = fresh.rbegin(); next != fresh.rend(); ++next) put(next->first, next->second);
}

// In a place of its own, or in that of the id which the text has not had for the longest.
void DraftVocabulary::put(int id, int position) {
  int output = own_.outputs;
  if (output < kMost) {
    Matrix more = own_;
    more.outputs = output + 1;
    if (kernels_ != nullptr && more.bytes() > memory_.bytes()) {
      Memory grown(std::max(more.bytes(), 2 * memory_.bytes()));
      if (output > 0) std::memcpy(grown.as<>(), memory_.as<>(), own_.bytes());
      memory_ = std::move(grown);
    }
    own_ = more;
    own_.data = memory_.as<>();
    ids_.push_back(id);
    last_.push_back(position);
    ++size_;
  } else {
    const auto oldest = std::min_element(last_.begin(), last_.end());
    if (*oldest > position) return;
    output = int(oldest - last_.begin());
    places_.erase(place_of(ids_[size_t(listed() + output)]));
    ids_[size_t(listed() + output)] = id;
    *oldest = position;
  }
  places_.insert(std::lower_bound(places_.begin(), places_.end(), std::pair(id, 0)), {id, output});
  if (kernels_ != nullptr) pack_row(*kernels_, lm_head_, id, own_, output);
}

std::vector<std::pair<int, int>>::const_iterator DraftVocabulary::place_of(int id) const {
  const auto place = std::lower_bound(places_.begin(), places_.end(), std::pair(id, 0));
  return place != places_.end() && place->first == id ? place : places_.end();
}

int DraftVocabulary::index_of(int id) const {
  if (ids_.empty()) return id >= 0 && id < size_ ? id : -1;   // a stop id may be none of the vocabulary's
  const auto end = ids_.begin() + listed(), found = std::lower_bound(ids_.begin(), end, id);
  if (found != end && *found == id) return int(found - ids_.begin());
  const auto place = place_of(id);
  return place != places_.end() ? listed() + place->second : -1;
}

}  // namespace ppsd
