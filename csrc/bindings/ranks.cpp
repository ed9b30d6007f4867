// Single stages for ranks: the draft stage with the scheduler, and verification stages with an inbox. Messages are rows
// of int32 arrays that Python sends and receives; nothing here holds the interpreter lock while it waits or works.
#include "bindings.h"

#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include "../cpu/ranks.h"

namespace py = pybind11;
using namespace ppsd;
using namespace ppsd::bindings;

namespace {

using Words = py::array_t<int32_t, py::array::c_style>;

// Messages of `out`, [messages][words each].
int32_t* place_for(Words& out, int messages, int hidden) {
  if (out.ndim() != 2 || out.shape(0) < messages || size_t(out.shape(1)) != most_words(hidden))
    throw std::runtime_error("messages need a dense array of int32, [" + std::to_string(messages) + "][" +
                             std::to_string(most_words(hidden)) + "]");
  return out.mutable_data();
}

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

// mask: of its grammar, for this side; only stages of answers that have one are told of it.
void begin_stage(const py::object& stage, int keep, const Settings& settings, const TokenMask* mask) {
  py::dict named;
  if (mask != nullptr) named["mask"] = object_of(*mask);
  stage.attr("begin")(keep, settings.end, settings.prompt, sampling_params_of(settings.sampling), **named);
}

// Of a step or a chunk: only stages that run siblings are asked to.
template <class Message>
py::dict siblings_for(const Message& message) {
  const auto pair = [](const Sibling& sibling) { return py::make_tuple(sibling.position, sibling.id); };
  py::dict named;
  if (message.siblings.empty() && !message.adopted) return named;
  py::list siblings;
  for (const Sibling& sibling : message.siblings) siblings.append(pair(sibling));
  named["siblings"] = siblings;
  named["adopted"] = message.adopted ? py::object(pair(*message.adopted)) : py::object(py::none());
  return named;
}

class PythonVerifyStage final : public VerifyStage {
 public:
  PythonVerifyStage(py::object stage, int hidden) : stage_(std::move(stage)), hidden_(hidden) {}

  void begin(int keep, const Settings& settings) {
    const py::gil_scoped_acquire lock;
    logprobs_ = settings.sampling.logprobs >= 0;
    begin_stage(stage_, keep, settings, settings.sampling.mask.get());
  }
  bool run(Chunk* chunk, const Cancelled& cancelled) override {
    const py::gil_scoped_acquire lock;
    const py::object out = stage_.attr("run")(chunk->start, chunk->ids, rows_of(chunk->hidden, chunk->all_rows()),
                                              ask(cancelled), **siblings_for(*chunk));
    if (out.is_none()) return false;
    take_rows(out, chunk->all_rows(), hidden_, &chunk->hidden);
    return true;
  }
  std::vector<int> choose(const Chunk&, int last) override {
    const py::gil_scoped_acquire lock;
    return stage_.attr("choose")(last).cast<std::vector<int>>();
  }
  std::vector<Logprobs> take_logprobs() override {
    const py::gil_scoped_acquire lock;
    std::vector<Logprobs> logprobs;
    if (logprobs_)
      for (const auto& [own, top] : stage_.attr("take_logprobs")().cast<std::vector<std::pair<float, std::vector<std::pair<int, float>>>>>())
        logprobs.push_back({own, top});
    return logprobs;
  }

 private:
  const py::object stage_;
  const int hidden_;
  bool logprobs_ = false;
};

class PythonStation : public RankStation {
 public:
  PythonStation(py::object stage, int hidden, bool last, double delay) : RankStation(hidden), stage_(std::move(stage), hidden) {
    wait_for_rows(&stage_, last, [this](int keep, const Settings& settings) { stage_.begin(keep, settings); }, delay);
  }

 private:
  PythonVerifyStage stage_;
};

class PythonDraftStage final : public DraftStage {
 public:
  PythonDraftStage(py::object stage, int hidden, int vocab_size)
      : stage_(std::move(stage)), hidden_(hidden), vocab_size_(vocab_size) {}

  void begin(int keep, const Settings& settings, const Oracle& oracle) {
    heard_.reset();
    oracle_ = oracle;
    begin_stage(stage_, keep, settings, settings.sampling.draft_mask.get());
  }
  int length() const { return stage_.attr("length").cast<int>(); }
  bool step(const DraftStep& step, Draft* draft, const Cancelled& cancelled) override {
    const py::gil_scoped_acquire lock;
    if (step.feedback && step.feedback != heard_) {
      heard_ = step.feedback;
      stage_.attr("learn")(heard_->position, rows_of(heard_->hidden, 1));
    }
    const py::object drawn = stage_.attr("step")(step.start, step.ids, draft != nullptr, ask(cancelled), **siblings_for(step));
    if (drawn.is_none()) return false;
    if (draft != nullptr) {
      const auto [token, confidence] = drawn.cast<std::tuple<int, double>>();
      *draft = foreseen(oracle_, {token, confidence, 0, -1, 0.0}, step.start + int(step.ids.size()), vocab_size_);
    }
    return true;
  }
  void export_hidden(Chunk* chunk) override {
    const py::gil_scoped_acquire lock;
    const int rows = chunk->all_rows();
    take_rows(stage_.attr("exported")(chunk->start, rows), rows, hidden_, &chunk->hidden);
  }

 private:
  const py::object stage_;
  const int hidden_, vocab_size_;
  Oracle oracle_;
  std::shared_ptr<const Feedback> heard_;
};

class PythonDrafter : public RankDrafter {
 public:
  PythonDrafter(py::object stage, int hidden, int vocab_size, bool hears)
      : RankDrafter(hidden, hears), stage_(std::move(stage), hidden, vocab_size) {}
  int length() const override { return stage_.length(); }

 private:
  DraftStage* stage() override { return &stage_; }
  void begin(int keep, const Settings& settings, const Oracle& oracle) override { stage_.begin(keep, settings, oracle); }

  PythonDraftStage stage_;
};

// An answer, seen from the rank that drafts.
struct PyRemote {
  std::unique_ptr<Remote> remote;
  int hidden = 0;

  int work(Words out) {
    int32_t* place = place_for(out, remote->most_messages(), hidden);
    const py::gil_scoped_release release;
    return remote->work(place);
  }
  bool land(const Words& verdict) {   // announce the epoch, and what it spares?
    const int32_t* words = verdict.data();
    const size_t count = size_t(verdict.size());
    const py::gil_scoped_release release;
    return remote->land(words, count);
  }
  py::object next(int milliseconds) {   // an event, None (nothing yet); ends with StopIteration
    Event event;
    Remote::Status status;
    double seconds = 0.0;
    {
      const py::gil_scoped_release release;
      status = remote->next(milliseconds, &event, &seconds);
    }
    if (status == Remote::Status::kEnded) throw py::stop_iteration();
    return status == Remote::Status::kEvent ? event_of(event, seconds) : py::object(py::none());
  }
};

}  // namespace

void bind_ranks(py::module_& m) {
  m.attr("WIRE_VERSION") = kWireVersion;
  m.attr("WIRE_ROWS") = int(Wire::kRows);   // the kind of a message that has rows
  m.attr("WIRE_MESSAGES") = (kPassRows + kMaxRows - 1) / kMaxRows + 1;   // that one piece of work writes at the most
  m.attr("WIRE_FEEDBACK") = int(kWireFeedback);   // the flag of a verdict that has rows too
  m.attr("WIRE_WORDS") = kWireRows;   // of a message without rows
  m.attr("WIRE_LOGPROB") = int(kWireLogprob);     // of one that tells log-probabilities,
  m.attr("WIRE_LOGPROBS") = kWireLogprobs;        // words of each row
  m.def("wire_words", &most_words);
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
  py::class_<Remote::Counts>(m, "RemoteCounts", "Draft steps of one row that counted, and their seconds.")
      .def_readonly("steps", &Remote::Counts::steps)
      .def_readonly("seconds", &Remote::Counts::seconds)
      .def("__repr__", [](const Remote::Counts& counts) {
        return py::str("RemoteCounts(steps={}, seconds={})").format(counts.steps, counts.seconds);
      });

  py::class_<RankStation>(m, "RankStation",
      "A verification stage that waits for messages, arrays of int32 words; work() writes those for the next stage.")
      .def("post", [](RankStation& rank, const Words& message) {
        rank.station().post(message.data(), size_t(message.size()));
      }, py::arg("message"))
      .def("announce", [](RankStation& rank, uint64_t epoch, int64_t sent, int spared) {
             rank.station().announce(epoch, sent, spared);
           }, py::arg("epoch"), py::arg("sent"), py::arg("spared") = -1, py::call_guard<py::gil_scoped_release>())
      .def("work", [](RankStation& rank, Words out, int milliseconds) {
             int32_t* place = place_for(out, rank.station().most_messages(), rank.hidden());
             const py::gil_scoped_release release;
             return rank.station().work(place, milliseconds);
           }, py::arg("out"), py::arg("milliseconds"))
      .def("use_masks", [](RankStation& rank, py::object masks) {
             rank.use([masks = std::move(masks)](int grammar) { return token_mask_from(masks, grammar); });
           }, py::arg("masks"), "masks(number): a new mask of that grammar, or None. Before it works.")
      .def("close", [](RankStation& rank) { rank.station().close(); })
      .def("busy_seconds", [](RankStation& rank) { return rank.station().busy_seconds(); })
      .def("counts", [](RankStation& rank) { return rank.station().counts(); })
      .def("spans", [](RankStation& rank) { return trace_spans(rank.station().trace().get()); },
           "Of an answer with a trace, so far: [(name, track, rows, begin, end)], microseconds of the wire_clock().");

  py::class_<CpuStation>(m, "Station",
      "Layers [first, last) of a model on the C++ kernels, as a stage of the loop: passes come, arrays of int32 words, and work() "
      "writes those for the next stage.")
      .def(py::init([](const PyModel& model, int first, int last, std::vector<int> cores, int threads, double delay,
                       size_t kv_bytes) {
             return std::make_unique<CpuStation>(model.model, first, last, std::move(cores), threads, delay, kv_bytes);
           }),
           py::keep_alive<1, 2>(), py::arg("model"), py::arg("first"), py::arg("last"), py::arg("cores"), py::arg("threads"),
           py::arg("delay"), py::arg("kv_bytes") = 0)
      .def("post", [](CpuStation& rank, const Words& message) {
        const py::gil_scoped_release release;
        rank.station().post(message.data(), size_t(message.size()));
      }, py::arg("message"))
      .def("work", [](CpuStation& rank, Words out, int milliseconds) {
             if (size_t(out.size()) < most_pass_words(rank.hidden())) throw std::runtime_error("a pass does not fit");
             int32_t* place = out.mutable_data();
             const py::gil_scoped_release release;
             return rank.station().work(place, milliseconds);
           }, py::arg("out"), py::arg("milliseconds"), "Words of the message for the next stage; 0: no pass came.")
      .def("use_masks", [](CpuStation& rank, py::object masks) {
             rank.passes().use([masks = std::move(masks)](int grammar) { return token_mask_from(masks, grammar); });
           }, py::arg("masks"), "masks(number): a new mask of that grammar, or None. Before it works.")
      .def("close", [](CpuStation& rank) { rank.station().close(); })
      .def("busy_seconds", [](CpuStation& rank) { return rank.station().busy_seconds(); })
      .def("counts", [](CpuStation& rank) { return rank.station().counts(); })
      .def("spans", [](CpuStation& rank) { return trace_spans(rank.station().trace().get()); },
           "Of answers with a trace, so far: [(name, track, rows, begin, end)], microseconds of the wire_clock().")
      .def_property_readonly("blocks", &CpuStation::blocks, "Of the loop's KV caches, that there is memory for.")
      .def("dwell", [](CpuStation& station, std::vector<double> seconds) { station.passes().dwell(Dwell(std::move(seconds))); },
           py::arg("seconds"), "For benchmarks: what the loop's passes over 1, 2, ... rows take.")
      .def("pin", &CpuStation::pin)
      .def("time_pass", &CpuStation::time_pass, py::arg("rows"), py::arg("context"), py::call_guard<py::gil_scoped_release>());

  py::class_<PythonStation, RankStation>(m, "PythonStation",
      "A verification stage of the ranks whose rows [count, hidden] a Python object computes.")
      .def(py::init<py::object, int, bool, double>(), py::arg("stage"), py::arg("hidden"), py::arg("last"), py::arg("delay"));

  py::class_<RankDrafter>(m, "RankDrafter", "The draft stage of the ranks; start() gives the answer, seen from here.")
      .def("pin", &RankDrafter::pin)
      .def("length", &RankDrafter::length)
      .def(
          "start",
          [](RankDrafter& drafter, const std::vector<int>& prompt, int keep, Sampling sampling,
             const Steering& steering, const Limits& limits, uint64_t epoch, bool report_drafts,
             const std::optional<Oracle>& oracle, bool trace, const std::optional<std::pair<int, py::object>>& grammar) {
            if (grammar) sampling.draft_mask = token_mask_of(grammar->second);
            const auto* schedule = std::get_if<Schedule>(&steering);
            return PyRemote{drafter.start(prompt, keep, sampling, schedule ? *schedule : Schedule(),
                                          schedule ? nullptr : std::get<std::shared_ptr<Planner>>(steering), limits, epoch,
                                          report_drafts, oracle.value_or(Oracle()), trace, grammar ? grammar->first : 0),
                            drafter.hidden()};
          },
          py::keep_alive<0, 1>(), py::arg("prompt"), py::arg("keep"), py::arg("sampling"), py::arg("schedule"),
          py::arg("limits"), py::arg("epoch"), py::arg("report_drafts") = false, py::arg("oracle") = py::none(),
          py::arg("trace") = false, py::arg("grammar") = py::none());

  py::class_<CpuDrafter>(m, "Drafter", "Layers before the exit, and the exit head, on the C++ kernels: what the loop's steps cost.")
      .def(py::init([](const PyModel& model, std::vector<int> cores, int threads) {
             return std::make_unique<CpuDrafter>(model.model, std::move(cores), threads);
           }),
           py::keep_alive<1, 2>(), py::arg("model"), py::arg("cores"), py::arg("threads"))
      .def_property_readonly("block_bytes", &CpuDrafter::block_bytes, "Of the loop's KV cache, for 64 positions.")
      .def("time_step", &CpuDrafter::time_step, py::arg("draw"), py::arg("context"), py::call_guard<py::gil_scoped_release>());

  py::class_<PythonDrafter, RankDrafter>(m, "PythonDrafter",
      "A draft stage of the ranks whose rows [count, hidden] a Python object computes.")
      .def(py::init<py::object, int, int, bool>(), py::arg("stage"), py::arg("hidden"), py::arg("vocab_size"),
           py::arg("hears"));

  py::class_<PyRemote>(m, "Remote",
      "An answer over ranks, seen from the one that drafts: what it sends, and what verdicts make of it.")
      .def_property_readonly("epoch", [](const PyRemote& answer) { return answer.remote->epoch(); })
      .def_property_readonly("spared", [](const PyRemote& answer) { return answer.remote->spared(); })
      .def_property_readonly("tokens", [](const PyRemote& answer) { return answer.remote->tokens(); })
      .def_property_readonly("rows", [](const PyRemote& answer) { return answer.remote->rows(); })
      .def("work", &PyRemote::work, py::arg("out"))
      .def("land", &PyRemote::land, py::arg("verdict"))
      .def("next", &PyRemote::next, py::arg("milliseconds"))
      .def("cancel", [](PyRemote& answer) { answer.remote->cancel(); })
      .def("counts", [](const PyRemote& answer) { return answer.remote->counts(); })
      .def("spans", [](const PyRemote& answer) { return trace_spans(answer.remote->trace()); },
           "Of an answer with a trace, as of a stage.");
}
