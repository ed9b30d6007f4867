// Single stages for ranks: the draft stage with the scheduler, and verification stages with an inbox. Messages are rows
// of int32 arrays that Python sends and receives; nothing here holds the interpreter lock while it waits or works.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#if defined(__linux__)
#include <sys/prctl.h>
#endif

#include "bindings.h"
#include "cpu/engine.h"
#include "cpu/tensor_parallel.h"
#include "pipeline/remote.h"
#include "pipeline/station.h"

namespace py = pybind11;
using namespace ppsd;
using namespace ppsd::bindings;

namespace {

using Words = py::array_t<int32_t, py::array::c_style>;
using Clock = std::chrono::steady_clock;

constexpr int kPromptWord = 8;   // of an answer's settings

// Messages of `out`, [messages][words each].
int32_t* place_for(Words& out, int messages, int hidden) {
  if (out.ndim() != 2 || out.shape(0) < messages || size_t(out.shape(1)) != wire_words(kMaxRows, hidden))
    throw std::runtime_error("messages need a dense array of int32, [" + std::to_string(messages) + "][" +
                             std::to_string(wire_words(kMaxRows, hidden)) + "]");
  return out.mutable_data();
}

// The settings of an answer in the words of its first message. prompt: its tokens.
std::vector<int32_t> settings_of(const Sampling& sampling, int end, int prompt) {
  std::vector<int32_t> words(kWireSettings);
  const float floats[] = {sampling.temperature, sampling.top_p, sampling.min_p, sampling.repetition_penalty};
  words[0] = end;
  std::memcpy(&words[1], floats, sizeof floats);
  words[5] = sampling.top_k;
  std::memcpy(&words[6], &sampling.seed, 8);
  words[kPromptWord] = prompt;
  return words;
}

Sampling sampling_of(const int32_t* words) {
  Sampling sampling;
  float floats[4];
  std::memcpy(floats, words + 1, sizeof floats);
  sampling.temperature = floats[0], sampling.top_p = floats[1], sampling.min_p = floats[2];
  sampling.repetition_penalty = floats[3];
  sampling.top_k = words[5];
  std::memcpy(&sampling.seed, words + 6, 8);
  return sampling;
}

// The rotary table of a stage, as long as the longest answer so far.
class Rope {
 public:
  explicit Rope(const CpuModel& model) : frequencies_(model.frequencies) {}
  const float* reserve(int capacity) {
    if (capacity > capacity_) rope_ = make_rope(frequencies_, capacity_ = capacity);
    return rope_.data();
  }
  int capacity() const { return capacity_; }

 private:
  const std::vector<float>& frequencies_;
  std::vector<float> rope_;
  int capacity_ = 0;
};

double since(Clock::time_point begin) { return std::chrono::duration<double>(Clock::now() - begin).count(); }

// A verification stage that waits for rows. What holds the stage makes `station_`.
class RankStation {
 public:
  virtual ~RankStation() = default;
  void post(const Words& message) { station_->post(message.data(), size_t(message.size())); }
  void announce(uint64_t epoch, int64_t sent) { station_->announce(epoch, sent); }
  int work(Words out, int milliseconds) {
    int32_t* place = place_for(out, station_->most_messages(), hidden_);
    const py::gil_scoped_release release;
    return station_->work(place, milliseconds);
  }
  void close() { station_->close(); }
  double busy_seconds() const { return station_->busy_seconds(); }
  py::tuple counts() const {
    const Station::Counts counts = station_->counts();
    return py::make_tuple(counts.passes, counts.rows, counts.dropped_passes, counts.seconds);
  }

 protected:
  explicit RankStation(int hidden) : hidden_(hidden) {}
  const int hidden_;
  std::unique_ptr<Station> station_;
};

// Layers [first, last) of a model.
class CpuStation final : public RankStation {
 public:
  CpuStation(const PyModel& model, int first, int last, std::vector<int> cores, int threads, double delay)
      : RankStation(model.model->shape.hidden_size),
        model_(model),
        team_(threads, std::move(cores)),
        stage_(*model.model, first, last, threads),
        rope_(*model.model),
        last_(last == model.model->shape.num_layers) {
    const auto begin = [this](int keep, int end, const int32_t* settings) { this->begin(keep, end, sampling_of(settings)); };
    station_ = std::make_unique<Station>(&stage_, hidden_, last_, kPassRows, begin, delay);
    stage_.use(&team_);
  }

  void pin() { team_.pin_caller(); }

  // Seconds of a pass over so many rows behind `context` others, the choice of tokens included. Not while it works.
  double time_pass(int rows, int context) {
    reserve(context + kMaxRows);
    if (stage_.length() < context) {
      stage_.begin({}, 0);
      run(0, context);
    }
    return run(context, rows);
  }

 private:
  void begin(int keep, int end, const Sampling& sampling) {
    reserve(end);
    stage_.begin(sampling, keep);
  }
  void reserve(int rows) {
    const int capacity = std::max(rows, rope_.capacity());
    stage_.reserve(capacity, rope_.reserve(capacity));
  }
  double run(int start, int rows) {
    Chunk chunk;
    chunk.start = start;
    for (int r = 0; r < rows; ++r) chunk.ids.push_back((start + r) % model_.model->shape.vocab_size);
    for (size_t i = 0; i < size_t(rows) * hidden_; ++i) chunk.hidden.push_back(float(i * 37 % 101) / 101.0f - 0.5f);
    const Clock::time_point begin = Clock::now();
    stage_.run(&chunk, nullptr);
    if (last_) stage_.choose(chunk, std::min(rows, kMaxRows));
    return since(begin);
  }

  const PyModel model_;
  Team team_;
  CpuVerifyStage stage_;
  Rope rope_;
  const bool last_;
};

// The stage in front of the exit head, with the head; one Remote for each answer.
class RankDrafter {
 public:
  virtual ~RankDrafter() = default;
  virtual void pin() = 0;
  virtual int length() const = 0;

  std::unique_ptr<Remote> start(const std::vector<int>& prompt, int keep, const Sampling& sampling, const Schedule& schedule,
                                const Limits& limits, uint64_t epoch, bool report_drafts, const Oracle& oracle) {
    if (keep > length()) throw std::runtime_error("there are not so many rows to keep");
    begin(keep, limits.end, int(prompt.size()), sampling, oracle);
    auto remote =
        std::make_unique<Remote>(stage(), hidden_, kPassRows, schedule, limits, sampling.seed, epoch, report_drafts, hears_);
    remote->begin(prompt, keep, settings_of(sampling, limits.end, int(prompt.size())));
    return remote;
  }
  int hidden() const { return hidden_; }

 protected:
  // hears: its head is of a kind that hears of verified rows
  RankDrafter(int hidden, bool hears) : hidden_(hidden), hears_(hears) {}
  virtual void begin(int keep, int end, int prompt, const Sampling& sampling, const Oracle& oracle) = 0;
  virtual DraftStage* stage() = 0;

 private:
  const int hidden_;
  const bool hears_;
};

class CpuDrafter final : public RankDrafter {
 public:
  CpuDrafter(const PyModel& model, std::vector<int> cores, int threads)
      : RankDrafter(model.model->shape.hidden_size, !model.model->exit_feedback.distances.empty()),
        model_(model),
        team_(threads, std::move(cores)),
        stage_(*model.model, threads),
        rope_(*model.model) {
    stage_.use(&team_);
  }

  void pin() override { team_.pin_caller(); }
  int length() const override { return stage_.length(); }

  // Seconds of a row through the early layers behind `context` others; draw: and of the exit head.
  double time_step(bool draw, int context) {
    Draft draft;
    reserve(context + kMaxRows);
    if (stage_.length() < context) {
      stage_.begin({}, 0);
      DraftStep step;
      for (int id = 0; id < context; ++id) step.ids.push_back(id % model_.model->shape.vocab_size);
      stage_.step(step, &draft, nullptr);
    }
    DraftStep step;
    step.start = context;
    step.ids = {context % model_.model->shape.vocab_size};
    const Clock::time_point begin = Clock::now();
    stage_.step(step, draw ? &draft : nullptr, nullptr);
    return since(begin);
  }

 private:
  DraftStage* stage() override { return &stage_; }
  void begin(int keep, int end, int, const Sampling& sampling, const Oracle& oracle) override {
    reserve(end);
    stage_.begin(sampling, keep);
    stage_.set_oracle(oracle);
  }
  void reserve(int rows) {
    const int capacity = std::max(rows, rope_.capacity());
    stage_.reserve(capacity, rope_.reserve(capacity));
  }

  const PyModel model_;
  Team team_;
  CpuDraftStage stage_;
  Rope rope_;
};

// -- stages in Python (ppsd_rt/ranks/torch_stages.py and cuda_stages.py say what they do) ------------------------------------------------

using Rows = py::array_t<float, py::array::c_style | py::array::forcecast>;

py::dict values_of(const Sampling& s) {
  py::dict values;
  values["temperature"] = s.temperature, values["top_k"] = s.top_k, values["top_p"] = s.top_p, values["min_p"] = s.min_p;
  values["repetition_penalty"] = s.repetition_penalty, values["seed"] = s.seed;
  return values;
}

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

class PythonVerifyStage final : public VerifyStage {
 public:
  PythonVerifyStage(py::object stage, int hidden) : stage_(std::move(stage)), hidden_(hidden) {}

  void begin(int keep, int end, int prompt, const Sampling& sampling) {
    const py::gil_scoped_acquire lock;
    stage_.attr("begin")(keep, end, prompt, values_of(sampling));
  }
  bool run(Chunk* chunk, const Cancelled& cancelled) override {
    const py::gil_scoped_acquire lock;
    const py::object out = stage_.attr("run")(chunk->start, chunk->ids, rows_of(chunk->hidden, chunk->rows()), ask(cancelled));
    if (out.is_none()) return false;
    take_rows(out, chunk->rows(), hidden_, &chunk->hidden);
    return true;
  }
  std::vector<int> choose(const Chunk&, int last) override {
    const py::gil_scoped_acquire lock;
    return stage_.attr("choose")(last).cast<std::vector<int>>();
  }

 private:
  const py::object stage_;
  const int hidden_;
};

class PythonStation : public RankStation {
 public:
  PythonStation(py::object stage, int hidden, bool last, double delay) : RankStation(hidden), stage_(std::move(stage), hidden) {
    const auto begin = [this](int keep, int end, const int32_t* settings) {
      stage_.begin(keep, end, settings[kPromptWord], sampling_of(settings));
    };
    station_ = std::make_unique<Station>(&stage_, hidden, last, kPassRows, begin, delay);
  }

 private:
  PythonVerifyStage stage_;
};

class PythonDraftStage final : public DraftStage {
 public:
  PythonDraftStage(py::object stage, int hidden, int vocab_size)
      : stage_(std::move(stage)), hidden_(hidden), vocab_size_(vocab_size) {}

  void begin(int keep, int end, int prompt, const Sampling& sampling, const Oracle& oracle) {
    heard_.reset();
    oracle_ = oracle;
    stage_.attr("begin")(keep, end, prompt, values_of(sampling));
  }
  int length() const { return stage_.attr("length").cast<int>(); }
  bool step(const DraftStep& step, Draft* draft, const Cancelled& cancelled) override {
    const py::gil_scoped_acquire lock;
    if (step.feedback && step.feedback != heard_) {
      heard_ = step.feedback;
      stage_.attr("learn")(heard_->position, rows_of(heard_->hidden, 1));
    }
    const py::object drawn = stage_.attr("step")(step.start, step.ids, draft != nullptr, ask(cancelled));
    if (drawn.is_none()) return false;
    if (draft != nullptr) {
      const auto [token, confidence] = drawn.cast<std::tuple<int, double>>();
      *draft = foreseen(oracle_, {token, confidence, 0, -1, 0.0}, step.start + int(step.ids.size()), vocab_size_);
    }
    return true;
  }
  void export_hidden(Chunk* chunk) override {
    const py::gil_scoped_acquire lock;
    take_rows(stage_.attr("exported")(chunk->start, chunk->rows()), chunk->rows(), hidden_, &chunk->hidden);
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
  void pin() override {}
  int length() const override { return stage_.length(); }

 private:
  DraftStage* stage() override { return &stage_; }
  void begin(int keep, int end, int prompt, const Sampling& sampling, const Oracle& oracle) override {
    stage_.begin(keep, end, prompt, sampling, oracle);
  }

  PythonDraftStage stage_;
};

// An answer, seen from the rank that drafts.
struct PyRemote {
  std::unique_ptr<Remote> remote;
  int hidden = 0;
  double seconds = 0.0;

  int work(Words out) {
    int32_t* place = place_for(out, remote->most_messages(), hidden);
    const py::gil_scoped_release release;
    return remote->work(place);
  }
  // (announce?, None or how many of the exit head's drafts the round judged and accepted)
  py::tuple land(const Words& verdict) {
    std::optional<Round> round;
    bool announce = false;
    {
      const int32_t* words = verdict.data();
      const size_t count = size_t(verdict.size());
      const py::gil_scoped_release release;
      announce = remote->land(words, count, &round);
    }
    if (!round) return py::make_tuple(announce, py::none());
    int judged = 0, accepted = 0;
    for (int i = 0; i < int(round->judged.size()); ++i) {
      if (round->judged[i].copied > 0) continue;
      ++judged;
      accepted += i < round->accepted;
    }
    return py::make_tuple(announce, py::make_tuple(judged, accepted));
  }
  py::object next(int milliseconds) {   // an event, None (nothing yet); ends with StopIteration
    Event event;
    Remote::Status status;
    {
      const py::gil_scoped_release release;
      status = remote->next(milliseconds, &event, &seconds);
    }
    if (status == Remote::Status::kEnded) throw py::stop_iteration();
    return status == Remote::Status::kEvent ? event_of(event) : py::object(py::none());
  }
};

// A share of every layer; arrays are [rows][hidden], `part` is written.
struct PyShares {
  using Part = py::array_t<float, py::array::c_style>;   // also written to: never a copy

  explicit PyShares(const PyModel& model) : model(model), shares(*model.model) {}
  void reserve(int capacity) { shares.reserve(capacity); }
  void attention(int layer, const Part& x, int start, Part part) {
    check(x, part);
    const float* from = x.data();
    float* to = part.mutable_data();
    const int rows = int(x.shape(0));
    const py::gil_scoped_release release;
    shares.attention(layer, from, rows, start, to);
  }
  void mlp(int layer, const Part& x, Part part) {
    check(x, part);
    const float* from = x.data();
    float* to = part.mutable_data();
    const int rows = int(x.shape(0));
    const py::gil_scoped_release release;
    shares.mlp(layer, from, rows, to);
  }
  std::pair<float, int> best(const Part& x) {
    if (x.size() != model.model->shape.hidden_size) throw std::runtime_error("one row is wanted");
    const float* from = x.data();
    const py::gil_scoped_release release;
    const Candidate candidate = shares.best(from);
    return {candidate.score, candidate.id};
  }
  void check(const Part& x, const Part& part) const {
    const bool fits = x.ndim() == 2 && x.shape(1) == model.model->shape.hidden_size && x.shape(0) <= kPassRows &&
                      part.ndim() == 2 && part.shape(0) == x.shape(0) && part.shape(1) == x.shape(1);
    if (!fits) throw std::runtime_error("rows and their part are [up to 64][hidden]");
  }

  const PyModel model;
  LayerShares shares;
};

}  // namespace

void bind_ranks(py::module_& m) {
  m.attr("WIRE_VERSION") = kWireVersion;
  m.attr("WIRE_ROWS") = int(Wire::kRows);   // the kind of a message that has rows
  m.attr("WIRE_MESSAGES") = (kPassRows + kMaxRows - 1) / kMaxRows + 1;   // that one piece of work writes at the most
  m.attr("WIRE_FEEDBACK") = int(kWireFeedback);   // the flag of a verdict that has rows too
  m.attr("WIRE_WORDS") = kWireRows;   // of a message without rows
  m.def("wire_words", [](int hidden) { return wire_words(kMaxRows, hidden); });
  m.def("wire_clock", &wire_clock);
  m.def("precise_waits", [] {   // of the calling thread: the system may otherwise wake it 50 us late
#if defined(__linux__)
    prctl(PR_SET_TIMERSLACK, 1000UL, 0, 0, 0);
#endif
  });
  m.def("sleep_until", [](int64_t clock) {
    const py::gil_scoped_release release;
    std::this_thread::sleep_until(Clock::time_point(std::chrono::nanoseconds(clock)));
  });

  py::class_<RankStation>(m, "RankStation",
      "A verification stage that waits for messages, arrays of int32 words; work() writes those for the next stage.")
      .def("post", &RankStation::post, py::arg("message"))
      .def("announce", &RankStation::announce, py::arg("epoch"), py::arg("sent"), py::call_guard<py::gil_scoped_release>())
      .def("work", &RankStation::work, py::arg("out"), py::arg("milliseconds"))
      .def("close", &RankStation::close)
      .def("busy_seconds", &RankStation::busy_seconds)
      .def("counts", &RankStation::counts);

  py::class_<CpuStation, RankStation>(m, "Station",
      "Layers [first, last) of a model on the C++ kernels, as a verification stage of the ranks.")
      .def(py::init<const PyModel&, int, int, std::vector<int>, int, double>(), py::arg("model"), py::arg("first"),
           py::arg("last"), py::arg("cores"), py::arg("threads"), py::arg("delay"))
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
          [](RankDrafter& drafter, const std::vector<int>& prompt, int keep, const py::dict& sampling,
             const py::dict& schedule, const Limits& limits, uint64_t epoch, bool report_drafts, const py::object& oracle) {
            Oracle o;
            if (!oracle.is_none()) {
              const auto [truth, acceptance, seed] = oracle.cast<std::tuple<std::vector<int>, double, uint64_t>>();
              o = {truth, acceptance, seed};
            }
            const Sampling s = sampling_of(sampling);
            return PyRemote{drafter.start(prompt, keep, s, schedule_of(schedule), limits, epoch, report_drafts, o),
                            drafter.hidden()};
          },
          py::keep_alive<0, 1>(), py::arg("prompt"), py::arg("keep"), py::arg("sampling"), py::arg("schedule"),
          py::arg("limits"), py::arg("epoch"), py::arg("report_drafts") = false, py::arg("oracle") = py::none());

  py::class_<CpuDrafter, RankDrafter>(m, "Drafter",
      "Layers before the exit, and the exit head, on the C++ kernels, as the draft stage of the ranks.")
      .def(py::init<const PyModel&, std::vector<int>, int>(), py::arg("model"), py::arg("cores"), py::arg("threads"))
      .def("time_step", &CpuDrafter::time_step, py::arg("draw"), py::arg("context"), py::call_guard<py::gil_scoped_release>());

  py::class_<PythonDrafter, RankDrafter>(m, "PythonDrafter",
      "A draft stage of the ranks whose rows [count, hidden] a Python object computes.")
      .def(py::init<py::object, int, int, bool>(), py::arg("stage"), py::arg("hidden"), py::arg("vocab_size"),
           py::arg("hears"));

  py::class_<PyShares>(m, "LayerShares",
      "A tensor-parallel share of every layer: rows [up to 64, hidden] float32 in, this share's part of the sum out.")
      .def(py::init<const PyModel&>(), py::arg("model"))
      .def("reserve", &PyShares::reserve, py::arg("capacity"))
      .def("attention", &PyShares::attention, py::arg("layer"), py::arg("x"), py::arg("start"), py::arg("part"))
      .def("mlp", &PyShares::mlp, py::arg("layer"), py::arg("x"), py::arg("part"))
      .def("best", &PyShares::best, py::arg("x"));

  py::class_<PyRemote>(m, "Remote",
      "An answer over ranks, seen from the one that drafts: what it sends, and what verdicts make of it.")
      .def_readonly("seconds", &PyRemote::seconds)
      .def_property_readonly("epoch", [](const PyRemote& answer) { return answer.remote->epoch(); })
      .def_property_readonly("tokens", [](const PyRemote& answer) { return answer.remote->tokens(); })
      .def("work", &PyRemote::work, py::arg("out"))
      .def("land", &PyRemote::land, py::arg("verdict"))
      .def("next", &PyRemote::next, py::arg("milliseconds"))
      .def("set_schedule", [](PyRemote& answer, const py::dict& schedule) { answer.remote->set_schedule(schedule_of(schedule)); })
      .def("cancel", [](PyRemote& answer) { answer.remote->cancel(); })
      .def("counts", [](const PyRemote& answer) {
        const Remote::Counts counts = answer.remote->counts();
        return py::make_tuple(counts.steps, counts.seconds);
      });
}
