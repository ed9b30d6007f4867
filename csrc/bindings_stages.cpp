// The stages of one text, for a loop in Python. ppsd_rt/stages.py checks what it hands over, and says what the calls mean.
#include <pybind11/stl.h>

#include <optional>

#include "bindings.h"
#include "cpu/engine.h"

namespace py = pybind11;
using namespace ppsd;
using namespace ppsd::bindings;

namespace {

class TextStages {
 public:
  TextStages(const PyModel& model, int threads, const py::dict& sampling)
      : model_(model), engine_(new CpuEngine(model.model, threads, {}), NotAfterFork()) {
    Request request;
    request.sampling = sampling_of(sampling);
    engine_->begin(request, 0);
    engine_->use_shared_team();
  }

  void reserve(int capacity) { engine_->reserve(capacity); }

  std::optional<std::pair<int, double>> draft(int start, std::vector<int> ids, bool draw) {
    if (heard_ && heard_->position >= start) heard_.reset();   // that row is void
    DraftStep step;
    step.start = start;
    step.ids = std::move(ids);
    step.draw = draw;
    step.feedback = heard_;
    Draft draft;
    engine_->draft().step(step, draw ? &draft : nullptr, nullptr);
    if (!draw) return std::nullopt;
    return std::make_pair(draft.token, draft.confidence);
  }

  std::vector<int> verify(int start, const std::vector<int>& ids, int last) {
    const int end = start + int(ids.size()), first = end - last;
    std::vector<int> own;
    for (int done = start; done < end;) {
      const int rows = done < first ? first - done : std::min(kPassRows, end - done);
      Chunk chunk;
      chunk.start = done;
      chunk.ids.assign(ids.begin() + (done - start), ids.begin() + (done - start) + rows);
      engine_->draft().export_hidden(&chunk);
      for (auto& stage : engine_->verify()) stage->run(&chunk, nullptr);
      if (done >= first) {
        const std::vector<int> chosen = engine_->verify().back()->choose(chunk, rows);
        own.insert(own.end(), chosen.begin(), chosen.end());
        keep(chunk);
      }
      done += rows;
    }
    return own;
  }

  void learn(int position) {
    if (!hears()) return;
    const size_t hidden = size_t(model_.model->shape.hidden_size);
    const auto row = kept_.begin() + hidden * size_t(position - kept_from_);
    heard_ = std::make_shared<Feedback>(Feedback{position, {row, row + hidden}});
    kept_.clear();
  }

 private:
  bool hears() const { return !model_.model->exit_feedback.distances.empty(); }

  // Rows are kept as the last layer left them until one of them is learnt.
  void keep(const Chunk& chunk) {
    if (!hears()) return;
    const size_t hidden = size_t(model_.model->shape.hidden_size);
    const int kept = int(kept_.size() / hidden);
    if (chunk.start < kept_from_ || chunk.start > kept_from_ + kept) kept_.clear();
    if (kept_.empty()) kept_from_ = chunk.start;
    kept_.resize(hidden * size_t(chunk.start - kept_from_));
    kept_.insert(kept_.end(), chunk.hidden.begin(), chunk.hidden.end());
  }

  const PyModel model_;
  std::unique_ptr<CpuEngine, NotAfterFork> engine_;   // for its stages, caches and threads: it decodes nothing by itself
  std::shared_ptr<const Feedback> heard_;
  std::vector<float> kept_;   // [rows from kept_from_ on][hidden]
  int kept_from_ = 0;
};

}  // namespace

void bind_stages(py::module_& m) {
  const py::call_guard<py::gil_scoped_release> release;
  py::class_<TextStages>(m, "Stages",
                         "The stages of one text with KV caches and threads of their own, for ppsd_rt.stages.Stages, which "
                         "checks every argument.\n\nA call with `start` voids the rows that are held from there on.")
      .def(py::init<const PyModel&, int, const py::dict&>(), py::arg("model"), py::arg("threads"), py::arg("sampling"))
      .def("reserve", &TextStages::reserve, release, py::arg("capacity"),
           "Make room for `capacity` rows; those that are held stay.")
      .def("draft", &TextStages::draft, release, py::arg("start"), py::arg("ids"), py::arg("draw"),
           "Rows `ids` at positions start.. through the early layers; draw: -> (token, confidence) of the exit head on the "
           "last row, else None.")
      .def("verify", &TextStages::verify, release, py::arg("start"), py::arg("ids"), py::arg("last"),
           "Rows that draft() ran, through the verification layers -> the model's own id after each of the `last` rows.")
      .def("learn", &TextStages::learn, release, py::arg("position"),
           "The verified row at `position` is the newest committed one: feedback heads receive its last hidden state.");
}
