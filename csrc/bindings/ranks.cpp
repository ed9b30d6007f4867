// Stages for ranks: passes come in and go out as int32 arrays, which Python sends and receives. Nothing here holds the
// interpreter lock while it waits.
#include "bindings.h"

#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <optional>
#include <tuple>

#include "../cpu/ranks.h"

namespace py = pybind11;
using namespace ppsd;
using namespace ppsd::bindings;

namespace {

using Words = py::array_t<int32_t, py::array::c_style>;

// -- stages in Python (ppsd_rt/ranks/python_stages.py says what they do) -------------------------------------------------

using Rows = py::array_t<float, py::array::c_style | py::array::forcecast>;

Rows rows_of(const std::vector<float>& hidden, int rows) {
  return Rows({py::ssize_t(rows), py::ssize_t(hidden.size()) / std::max(rows, 1)}, hidden.data());
}

// [rows][hidden], as a stage gave them.
void take_rows(const py::object& from, int rows, int hidden, std::vector<float>* to) {
  const auto array = Rows::ensure(from);
  if (!array || array.ndim() != 2 || array.shape(0) != rows || array.shape(1) != hidden)
    throw std::runtime_error("a stage gave other rows than those it was asked for");
  to->assign(array.data(), array.data() + array.size());
}

py::object ask(const Cancelled& cancelled) {   // for as long as the call takes
  return cancelled ? py::cpp_function([&cancelled] { return cancelled(); }) : py::object(py::none());
}

void begin_stage(const py::object& stage, int keep, const Settings& settings) {
  stage.attr("begin")(keep, settings.end, settings.prompt, sampling_params_of(settings.sampling));
}

// A slice of layers in Python. It holds the rows of one text, and so it has rows of one answer at a time.
class PythonStage {
 public:
  PythonStage(py::object stage, int hidden, bool last) : stage_(std::move(stage)), hidden_(hidden), last_(last) {}

  bool run(Pass* pass, const Cancelled& cancelled, PassVerdict* verdict) {
    if (pass->parts.size() != 1) throw std::runtime_error("a stage in Python has one answer at a time");
    const PassPart& part = pass->parts.front();
    if (!part.siblings.empty() || !pass->adopted.empty()) throw std::runtime_error("a stage in Python runs no siblings");
    if (part.rows == 0) return true;
    for (const Pass::Opened& opened : pass->opened) begin(part.start, opened.settings);
    if (part.start > held_ || part.start + part.rows > end_) throw std::runtime_error("a pass has rows that are not of its answer");
    const Callback callback;
    const std::vector<int> ids(part.ids.end() - part.rows, part.ids.end());
    held_ = part.start;
    const py::object out = stage_.attr("run")(part.start, ids, rows_of(pass->hidden, part.rows), ask(cancelled));
    if (out.is_none()) return false;
    take_rows(out, part.rows, hidden_, &pass->hidden);
    held_ += part.rows;
    if (!last_ || part.chooses == 0) return true;
    verdict->chosen = stage_.attr("choose")(part.chooses).cast<std::vector<int32_t>>();
    if (pass->wants_hidden)
      verdict->hidden.assign(pass->hidden.end() - ptrdiff_t(part.chooses) * hidden_, pass->hidden.end());
    return true;
  }

 private:
  void begin(int keep, const std::vector<int32_t>& words) {
    if (words.size() < size_t(kWireSettings)) throw std::runtime_error("an answer's settings are malformed");
    const Settings settings = settings_of(words);
    if (keep > held_)
      throw std::runtime_error("an answer wants to keep " + std::to_string(keep) + " rows; this stage holds " + std::to_string(held_));
    if (settings.grammar != 0) throw std::runtime_error("this rank knows no grammars");
    held_ = keep;
    end_ = settings.end;
    const Callback callback;
    begin_stage(stage_, keep, settings);
  }

  const py::object stage_;
  const int hidden_;
  const bool last_;
  int held_ = 0, end_ = 0;            // rows that have passed, and that the answer may have
};

class PythonStation {
 public:
  PythonStation(py::object stage, int hidden, bool last, double delay)
      : hidden_(hidden),
        stage_(std::move(stage), hidden, last),
        station_([this](Pass* pass, const Cancelled& cancelled, PassVerdict* verdict) { return stage_.run(pass, cancelled, verdict); },
                 hidden, last, delay) {}

  int hidden() const { return hidden_; }
  int taps() const { return 0; }
  PassStation& station() { return station_; }

 private:
  const int hidden_;
  PythonStage stage_;
  PassStation station_;
};

std::shared_ptr<const CpuModel> without_layers(int hidden, int vocab_size) {
  auto model = std::make_shared<CpuModel>();
  model->kernels = &pick_kernels();
  model->shape.hidden_size = hidden;
  model->shape.vocab_size = vocab_size;
  model->format = Format::kFp32;
  model->kv = Stored::kFp32;
  return model;
}

// The draft stage in Python, for a loop of one answer at a time.
class PythonPasses final : public Passes {
 public:
  PythonPasses(py::object stage, int hidden, int vocab_size, bool draws, bool hears)
      : Passes(without_layers(hidden, vocab_size), std::make_unique<Team>(1, std::vector<int>())),
        stage_(std::move(stage)),
        draws_(draws),
        hears_(hears) {}
  ~PythonPasses() override {
    const py::gil_scoped_acquire lock;
    stage_ = {};
  }

  size_t block_bytes() const override { return 0; }
  double draft_share() const override { return 0.0; }
  bool drafts() const override { return draws_; }
  bool uses_feedback() const override { return hears_; }
  bool one_text() const override { return true; }
  int held() const override {
    const Callback callback;
    return stage_.attr("length").cast<int>();
  }
  void begin(const Request& request, int kept) override {
    const Callback callback;
    heard_.reset();
    const Settings settings{request.limits.end, int(request.prompt.size()) - request.limits.own, 0, request.sampling};
    begin_stage(stage_, kept, settings);
  }
  void embed(const int* ids, int rows, float*) override { ids_.assign(ids, ids + rows); }
  bool early(const std::vector<Segment>& segments, float* x, const std::vector<Sibling>&, const Cancelled& cancelled) override {
    const Callback callback;
    const Segment& rows = segments.front();
    if (stage_.attr("step")(rows.start, ids_, false, ask(cancelled)).is_none()) return false;
    std::vector<float> hidden;
    take_rows(stage_.attr("exported")(rows.start, rows.rows), rows.rows, model().shape.hidden_size, &hidden);
    std::copy(hidden.begin(), hidden.end(), x);
    return true;
  }
  bool draw(std::vector<Draw>* draws, const Cancelled& cancelled) override {
    const Callback callback;
    Draw& draw = draws->front();
    if (draw.feedback != nullptr && draw.feedback->position != heard_) {
      heard_ = draw.feedback->position;
      stage_.attr("learn")(draw.feedback->position, rows_of(draw.feedback->hidden, 1));
    }
    const py::object drawn = stage_.attr("step")(draw.position(), std::vector<int>(), true, ask(cancelled));
    if (drawn.is_none()) return false;
    std::tie(draw.draft.token, draw.draft.confidence) = drawn.cast<std::pair<int, double>>();
    return true;
  }

 private:
  py::object stage_;
  const bool draws_, hears_;
  std::vector<int> ids_;
  std::optional<int> heard_;
};

PyLoop loop_of_python(py::object stage, int hidden, int vocab_size, bool draws, bool hears, int stages, int blocks) {
  PyLoop made{{}, nullptr, nullptr};
  auto early = std::make_unique<PythonPasses>(std::move(stage), hidden, vocab_size, draws, hears);
  const py::gil_scoped_release release;
  made.stepped.reset(new Loop(std::move(early), Loop::OverRanks{stages, blocks}, LoopLimits{1, 1, {}}));
  return made;
}

// What a station of either kind can do.
template <class Station>
py::class_<Station> bind_station(py::module_& m, const char* name, const char* doc) {
  return py::class_<Station>(m, name, doc)
      .def("post", [](Station& rank, const Words& message) {
        const py::gil_scoped_release release;
        rank.station().post(message.data(), size_t(message.size()));
      }, py::arg("message"))
      .def("work", [](Station& rank, Words out, int milliseconds) {
             if (size_t(out.size()) < most_pass_words(rank.hidden(), rank.taps()))
               throw std::runtime_error("a pass does not fit");
             int32_t* place = out.mutable_data();
             const py::gil_scoped_release release;
             return rank.station().work(place, milliseconds);
           }, py::arg("out"), py::arg("milliseconds"), "Words of the message for the next stage; 0: no pass came.")
      .def("close", [](Station& rank) { rank.station().close(); })
      .def("busy_seconds", [](Station& rank) { return rank.station().busy_seconds(); })
      .def("counts", [](Station& rank) { return rank.station().counts(); })
      .def("spans", [](Station& rank) { return trace_spans(rank.station().trace().get()); },
           "Of answers with a trace, so far: [(name, track, rows, begin, end)], microseconds of the wire_clock().");
}

}  // namespace

void bind_ranks(py::module_& m) {
  m.attr("WIRE_VERSION") = kWireVersion;
  m.def("wire_clock", &wire_clock);
  m.def("precise_waits", &precise_waits, "Of the calling thread: the system may otherwise wake it 50 us late.");
  m.def("sleep_until", &sleep_until, py::arg("clock"), py::call_guard<py::gil_scoped_release>(), "Until a wire_clock().");

  py::class_<StationCounts>(m, "StationCounts", "What a verification stage has done, and the seconds of passes that counted.")
      .def_readonly("passes", &StationCounts::passes)
      .def_readonly("rows", &StationCounts::rows)
      .def_readonly("dropped_passes", &StationCounts::dropped_passes)
      .def_readonly("seconds", &StationCounts::seconds)
      .def("__repr__", [](const StationCounts& counts) {
        return py::str("StationCounts(passes={}, rows={}, dropped_passes={}, seconds={})")
            .format(counts.passes, counts.rows, counts.dropped_passes, counts.seconds);
      });

  bind_station<CpuStation>(m, "Station",
      "Layers [first, last) of a model on the C++ kernels, as a stage of the loop: passes come, arrays of int32 words, and work() "
      "writes those for the next stage.")
      .def(py::init([](const PyModel& model, int first, int last, std::vector<int> cores, int threads, double delay,
                       size_t kv_bytes, const std::vector<int>& taps) {
             return std::make_unique<CpuStation>(model.model, first, last, std::move(cores), threads, delay, kv_bytes, taps);
           }),
           py::keep_alive<1, 2>(), py::arg("model"), py::arg("first"), py::arg("last"), py::arg("cores"), py::arg("threads"),
           py::arg("delay"), py::arg("kv_bytes") = 0, py::arg("taps") = std::vector<int>(),
           "taps: of an EAGLE-3 head, after so many of the model's layers.")
      .def_property_readonly("blocks", &CpuStation::blocks, "Of the loop's KV caches, that there is memory for.")
      .def("dwell", [](CpuStation& station, std::vector<double> seconds) { station.passes().dwell(Dwell(std::move(seconds))); },
           py::arg("seconds"), "For benchmarks: what passes over 1, 2, ... rows take.")
      .def("use_masks", [](CpuStation& rank, py::object masks) {
             rank.passes().use([masks = std::move(masks)](int grammar) { return token_mask_from(masks, grammar); });
           }, py::arg("masks"), "masks(number): a new mask of that grammar, or None. Before it works.")
      .def("pin", &CpuStation::pin)
      .def("time_pass", &CpuStation::time_pass, py::arg("rows"), py::arg("context"), py::call_guard<py::gil_scoped_release>());

  bind_station<PythonStation>(m, "PythonStation", "As Station; a Python object computes the rows [count, hidden].")
      .def(py::init<py::object, int, bool, double>(), py::arg("stage"), py::arg("hidden"), py::arg("last"), py::arg("delay"));

  py::class_<CpuDrafter>(m, "Drafter", "Layers before the exit, and the exit head, on the C++ kernels: what the loop's steps cost.")
      .def(py::init([](const PyModel& model, std::vector<int> cores, int threads) {
             return std::make_unique<CpuDrafter>(model.model, std::move(cores), threads);
           }),
           py::keep_alive<1, 2>(), py::arg("model"), py::arg("cores"), py::arg("threads"))
      .def_property_readonly("block_bytes", &CpuDrafter::block_bytes, "Of the loop's KV cache, for 64 positions.")
      .def("time_step", &CpuDrafter::time_step, py::arg("draw"), py::arg("context"), py::call_guard<py::gil_scoped_release>());

  m.def("loop_of_python", &loop_of_python, py::arg("stage"), py::arg("hidden"), py::arg("vocab_size"), py::arg("draws"),
        py::arg("hears"), py::arg("stages"), py::arg("blocks"),
        "The loop of rank 0, of one answer at a time, whose draft stage is a Python object. draws: it has an exit head; hears: "
        "which draws on verified rows too.");
}
