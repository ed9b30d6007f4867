// Passes that a Python object computes, as ppsd_rt/reference/passes.py says. Numbers go and come as arrays of float32, and the C++
// samplers choose of the logits where the object does not.
#include "bindings.h"

#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <chrono>
#include <functional>
#include <optional>

namespace py = pybind11;
using namespace ppsd;
using namespace ppsd::bindings;

namespace {

using Floats = py::array_t<float, py::array::c_style | py::array::forcecast>;
using Steady = std::chrono::steady_clock;

// Python's, which ends the answers of the pass with its first line.
template <class Work>
auto in_python(const Work& work) {
  const Callback callback;
  try {
    return work();
  } catch (const py::error_already_set& error) {
    const auto why = py::str(error.value()).cast<std::string>();
    throw std::runtime_error(why.substr(0, why.find('\n')));
  }
}

Floats floats_of(const float* x, size_t rows, size_t width) { return Floats({py::ssize_t(rows), py::ssize_t(width)}, x); }

void copy_rows(const py::handle& from, size_t count, float* to) {
  const auto array = Floats::ensure(from);
  if (!array || size_t(array.size()) != count) throw std::runtime_error("the passes gave other rows than those they were asked for");
  std::copy_n(array.data(), count, to);
}

py::object stop_of(const Cancelled& cancelled) {   // for as long as the call takes
  return cancelled ? py::cpp_function([&cancelled] { return cancelled(); }) : py::object(py::none());
}

size_t count_of(const std::vector<Segment>& segments) {
  size_t rows = 0;
  for (const Segment& segment : segments) rows += size_t(segment.rows);
  return rows;
}

// What the loop must know of the model: it has no layers here.
std::shared_ptr<const CpuModel> facts_of(const py::object& passes) {
  auto model = std::make_shared<CpuModel>();
  model->kernels = &pick_kernels();
  model->shape.hidden_size = passes.attr("hidden_size").cast<int>();
  model->shape.vocab_size = passes.attr("vocab_size").cast<int>();
  model->format = Format::kFp32;
  model->kv = Stored::kFp32;
  model->rotary = passes.attr("rotary").cast<Rotary>();
  model->draft_ids = passes.attr("draft_ids").cast<std::vector<int>>();
  if (auto taps = passes.attr("taps").cast<std::vector<int>>(); !taps.empty() && passes.attr("hears").cast<bool>()) {
    model->tap.layer = taps.front();
  } else if (!taps.empty()) {
    Eagle eagle;
    eagle.shape.hidden_size = model->shape.hidden_size;
    eagle.taps = std::move(taps);
    model->eagle = std::make_shared<const Eagle>(std::move(eagle));
  }
  return model;
}

class PythonPasses final : public ModelBackend {
 public:
  explicit PythonPasses(py::object passes)
      : ModelBackend(facts_of(passes), std::make_unique<Team>(1, std::vector<int>())),
        drafts_(passes.attr("drafts").cast<bool>()),
        hears_(passes.attr("hears").cast<bool>()),
        lags_(passes.attr("lags").cast<bool>()),
        follows_(passes.attr("follows").cast<bool>()),
        decoded_rows_differ_(passes.attr("decoded_rows_differ").cast<bool>()),
        chooses_(passes.attr("chooses").cast<bool>()),
        draft_share_(passes.attr("draft_share").cast<double>()),
        passes_(std::move(passes)),
        eagle_(model().eagle ? std::make_unique<OwnRows>(this) : nullptr) {}
  ~PythonPasses() override {
    const py::gil_scoped_acquire lock;
    logits_.clear();
    passes_ = {};
  }

  size_t block_bytes() const override { return 8; }   // of which nothing but their number is of use
  void lie_in(Blocks* blocks) override {
    blocks_ = blocks;
    blocks->note_changes();
  }
  bool drafts() const override { return drafts_; }
  bool uses_feedback() const override { return hears_; }
  bool lags() const override { return lags_; }
  bool decoded_rows_differ() const override { return decoded_rows_differ_; }
  double draft_share() const override { return draft_share_; }
  DraftVocabulary draft_vocabulary() const override {
    return model().draft_ids.empty() ? DraftVocabulary(model().shape.vocab_size) : DraftVocabulary(model().draft_ids, follows_);
  }
  void reserve(int rows, int rotated_as) override {
    if (rows <= capacity_ && rotated_as == rotated_as_) return;
    if (rows > capacity_) capacity_ = std::max(rows, 2 * capacity_);
    rotated_as_ = rotated_as;
    in_python([&] { passes_.attr("reserve")(capacity_, rotated_as_); });
  }

  void embed(const int* ids, int rows, float* x) override {
    in_python([&] { copy_rows(passes_.attr("embed")(std::vector<int>(ids, ids + rows)), size_t(rows) * hidden(), x); });
  }
  bool early(const std::vector<Segment>& segments, float* x, const Cancelled& cancelled) override {
    return in_python([&] {
      follow_blocks();
      const size_t rows = count_of(segments);
      const py::object out = passes_.attr("early")(texts_of(segments), floats_of(x, rows, hidden()), stop_of(cancelled));
      if (!out.is_none()) copy_rows(out, rows * hidden(), x);
      return !out.is_none();
    });
  }
  bool draw(std::vector<Draw>* draws, const Cancelled& cancelled) override {
    std::vector<Head::Row> rows;
    if (eagle_) {
      std::vector<EagleStack::Work> works;
      for (const Draw& draw : *draws) works.push_back({draw.text, draw.rows.blocks, draw.rows.spans, draw.position() - 1});
      eagle_->advance(works);
    }
    const bool done = in_python([&] {
      follow_blocks();
      py::list wanted;
      for (Draw& draw : *draws) {
        const int away = draw.feedback != nullptr ? draw.position() - 1 - draw.feedback->position : 0;
        const Floats heard = away > 0 ? floats_of(draw.feedback->hidden.data(), 1, draw.feedback->hidden.size()) : floats_of(draw.states, 1, hidden());
        const Floats states = eagle_ ? floats_of(draw.text->output(), 1, hidden()) : floats_of(draw.states, size_t(draw.rows.rows), hidden());
        const int* ids = draw.vocabulary->ids();
        const std::vector<int> own(ids ? ids + model().draft_ids.size() : nullptr, ids ? ids + draw.vocabulary->size() : nullptr);
        wanted.append(py::make_tuple(text_of(draw.rows), states, away, heard, own));
        rows.push_back({nullptr, draw.sampler, draw.position(), draw.vocabulary});
      }
      const py::object out = passes_.attr("draw")(wanted, stop_of(cancelled));
      if (out.is_none()) return false;
      logits_.clear();
      for (const py::handle& logits : out) logits_.push_back(logits.cast<Floats>());
      for (size_t i = 0; hears_taps() && i < draws->size(); ++i) {
        std::vector<float>& drawn = (*draws)[i].drawn;
        drawn.resize(hidden());
        copy_rows(passes_.attr("drawn")[py::int_(i)], hidden(), drawn.data());
      }
      return true;
    });
    if (!done) return false;
    const std::vector<int> chosen = choose(rows);
    for (size_t i = 0; i < draws->size(); ++i) take(&(*draws)[i], chosen[i]);
    return true;
  }
  void prefill_head(const Segment& rows, const float* states) override {
    in_python([&] {
      follow_blocks();
      passes_.attr("catch_up")(text_of(rows), floats_of(states, size_t(rows.rows), hidden()));
    });
  }
  Chosen verify(const std::vector<Segment>& segments, float* x, const std::vector<Head::Row>& rows,
                const Cancelled& cancelled) override {
    Chosen out;
    const Steady::time_point begun = Steady::now();
    out.done = in_python([&] {
      follow_blocks();
      const size_t count = count_of(segments);
      const py::object late = passes_.attr("late")(texts_of(segments), floats_of(x, count, hidden()), stop_of(cancelled));
      if (late.is_none()) return false;
      const auto [states, taps] = late.cast<std::pair<py::object, py::object>>();
      if (!states.is_none()) copy_rows(states, count * hidden(), x);   // none: no exit head receives them
      tapped_.resize(count * tap_width());
      if (tap_width() > 0) copy_rows(taps, tapped_.size(), tapped_.data());
      return true;
    });
    if (!out.done) return out;
    const Steady::time_point chosen_from = Steady::now();
    if (!rows.empty()) out.ids = choose_after(rows, x);
    out.late = std::chrono::duration<double>(chosen_from - begun).count();
    out.choose = std::chrono::duration<double>(Steady::now() - chosen_from).count();
    return out;
  }
  void hear(const std::vector<Segment>& segments, const float* states, const float* taps) override {
    in_python([&] {
      follow_blocks();
      const size_t rows = count_of(segments);
      passes_.attr("hear")(texts_of(segments), floats_of(states, rows, hidden()), floats_of(taps, rows, hidden()));
    });
  }
  std::exception_ptr failure(const Sampler* sampler) const override {
    for (const auto& [failed, why] : failures_)
      if (failed == sampler) return why;
    return nullptr;
  }
  const float* tapped(int row) const override { return tapped_.data() + size_t(row) * tap_width(); }
  void read_taps(EagleText* text, uint8_t* const* blocks, int spans) override { eagle_->catch_up(text, blocks, spans); }

 private:
  struct OwnRows final : EagleStack {   // of an EAGLE-3 head
    explicit OwnRows(PythonPasses* whose) : EagleStack(*whose->model().eagle), passes(*whose) {}
    void pass(const std::vector<Segment>& segments, const std::vector<int>& ids, bool verified) override {
      in_python([&] {
        passes.follow_blocks();
        const Floats features = verified ? floats_of(raw_.data(), ids.size(), tap_width()) : floats_of(x_.data(), ids.size(), passes.hidden());
        copy_rows(passes.passes_.attr("eagle")(passes.texts_of(segments), ids, features, verified), ids.size() * passes.hidden(), x_.data());
      });
    }
    PythonPasses& passes;
  };

  bool hears_taps() const { return model().tap.layer > 0; }
  size_t hidden() const { return size_t(model().shape.hidden_size); }
  int number_of(const uint8_t* block) const { return int((block - blocks_->at(0)) / py::ssize_t(block_bytes())); }
  // (first position, rows, numbers of the blocks that hold them and what stands before, rows that are a prompt's)
  py::tuple text_of(const Segment& segment) const {
    py::list blocks;
    for (int i = 0; i * kSpan < segment.start + segment.rows; ++i) blocks.append(number_of(segment.blocks[i]));
    return py::make_tuple(segment.start, segment.rows, blocks, segment.prompt);
  }
  py::list texts_of(const std::vector<Segment>& segments) const {
    py::list texts;
    for (const Segment& segment : segments) texts.append(text_of(segment));
    return texts;
  }
  void follow_blocks() {
    const Blocks::Changes changes = blocks_->take_changes();
    if (!changes.wiped.empty() || !changes.copies.empty()) passes_.attr("change")(changes.wiped, changes.copies);
  }
  // What rows [.., hidden] of the last `late` choose: where temperature and seed are all that matters, the passes may do it.
  std::vector<int> choose_after(const std::vector<Head::Row>& rows, const float* x) {
    std::vector<int> chosen(rows.size(), Sampler::kNone), theirs;
    std::vector<size_t> ours;
    std::vector<Head::Row> by_logits;
    in_python([&] {
      py::list plain, wanted;
      for (size_t r = 0; r < rows.size(); ++r) {
        const Head::Row& row = rows[r];
        const py::ssize_t place = (row.x - x) / py::ssize_t(hidden());
        if (const auto how = row.sampler->alike(row.position); how && chooses_) {
          plain.append(py::make_tuple(place, row.position, how->seed, row.sampler->temperature()));
          theirs.push_back(int(r));
        } else {
          wanted.append(py::make_tuple(place, row.position - 1));
          ours.push_back(r);
          by_logits.push_back(row);
        }
      }
      if (!theirs.empty()) {
        const auto ids = passes_.attr("choose")(plain).cast<std::vector<int>>();
        if (ids.size() != theirs.size()) throw std::runtime_error("the passes chose for other rows than those they were asked for");
        for (size_t i = 0; i < ids.size(); ++i)
          if (ids[i] >= 0) chosen[size_t(theirs[i])] = ids[i];
      }
      logits_.clear();
      if (!ours.empty())
        for (const py::handle& logits : passes_.attr("logits")(wanted)) logits_.push_back(logits.cast<Floats>());
    });
    const std::vector<int> own = choose(by_logits);
    for (size_t i = 0; i < ours.size(); ++i) chosen[ours[i]] = own[i];
    return chosen;
  }
  // Of logits_, one for each row. Rows of one sampler lie together.
  std::vector<int> choose(const std::vector<Head::Row>& rows) {
    std::vector<int> chosen(rows.size(), Sampler::kNone);
    failures_.clear();
    const DraftVocabulary whole(model().shape.vocab_size);
    for (size_t first = 0, end = 0; first < rows.size(); first = end) {
      Sampler* sampler = rows[first].sampler;
      const DraftVocabulary& ids = rows[first].vocabulary ? *rows[first].vocabulary : whole;
      std::vector<int> positions;
      for (; end < rows.size() && rows[end].sampler == sampler; ++end) positions.push_back(rows[end].position);
      try {
        sampler->begin_rows(positions, ids.size(), true);
      } catch (const std::runtime_error&) {   // of a grammar: the others go on
        failures_.emplace_back(sampler, std::current_exception());
        continue;
      }
      for (size_t r = first; r < end; ++r) {
        if (logits_[r].size() != ids.size()) throw std::runtime_error("the passes gave other logits than those they were asked for");
        sampler->give(int(r - first), logits_[r].data(), ids.size());
        chosen[r] = sampler->choose(0, int(r - first), rows[r].position, ids);
      }
    }
    const Callback callback;
    logits_.clear();
    return chosen;
  }

  const bool drafts_, hears_, lags_, follows_, decoded_rows_differ_, chooses_;
  const double draft_share_;
  py::object passes_;
  const std::unique_ptr<OwnRows> eagle_;   // or null
  Blocks* blocks_ = nullptr;
  int capacity_ = 0, rotated_as_ = 0;
  std::vector<Floats> logits_;
  std::vector<float> tapped_;
  std::vector<std::pair<const Sampler*, std::exception_ptr>> failures_;
};

}  // namespace

std::unique_ptr<ModelBackend> ppsd::bindings::passes_of(py::object passes) { return std::make_unique<PythonPasses>(std::move(passes)); }
