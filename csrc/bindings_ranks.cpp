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

// Messages of `out`, [messages][words each].
int32_t* place_for(Words& out, int messages, int hidden) {
  if (out.ndim() != 2 || out.shape(0) < messages || size_t(out.shape(1)) != wire_words(kMaxRows, hidden))
    throw std::runtime_error("messages need a dense array of int32, [" + std::to_string(messages) + "][" +
                             std::to_string(wire_words(kMaxRows, hidden)) + "]");
  return out.mutable_data();
}

// The settings of an answer in the words of its first message.
std::vector<int32_t> settings_of(const Sampling& sampling, int end) {
  std::vector<int32_t> words(kWireSettings);
  const float floats[] = {sampling.temperature, sampling.top_p, sampling.min_p, sampling.repetition_penalty};
  words[0] = end;
  std::memcpy(&words[1], floats, sizeof floats);
  words[5] = sampling.top_k;
  std::memcpy(&words[6], &sampling.seed, 8);
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

// Layers [first, last) of a model, waiting for rows.
class CpuStation {
 public:
  CpuStation(const PyModel& model, int first, int last, std::vector<int> cores, int threads, double delay)
      : model_(model),
        hidden_(model.model->shape.hidden_size),
        team_(threads, std::move(cores)),
        stage_(*model.model, first, last, threads),
        rope_(*model.model),
        last_(last == model.model->shape.num_layers),
        station_(&stage_, hidden_, last_, kPassRows,
                 [this](int keep, int end, const int32_t* settings) { begin(keep, end, sampling_of(settings)); }, delay) {
    stage_.use(&team_);
  }

  void post(const Words& message) { station_.post(message.data(), size_t(message.size())); }
  void announce(uint64_t epoch, int64_t sent) { station_.announce(epoch, sent); }
  int work(Words out, int milliseconds) {
    int32_t* place = place_for(out, station_.most_messages(), hidden_);
    const py::gil_scoped_release release;
    return station_.work(place, milliseconds);
  }
  void pin() { team_.pin_caller(); }
  void close() { station_.close(); }
  double busy_seconds() const { return station_.busy_seconds(); }
  py::tuple counts() const {
    const Station::Counts counts = station_.counts();
    return py::make_tuple(counts.passes, counts.rows, counts.dropped_passes, counts.seconds);
  }

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
  const int hidden_;
  Team team_;
  CpuVerifyStage stage_;
  Rope rope_;
  const bool last_;
  Station station_;
};

// Layers [0, exit layer) and the exit head; one Remote for each answer.
class CpuDrafter {
 public:
  CpuDrafter(const PyModel& model, std::vector<int> cores, int threads)
      : model_(model), team_(threads, std::move(cores)), stage_(*model.model, threads), rope_(*model.model) {
    stage_.use(&team_);
  }

  std::unique_ptr<Remote> start(const std::vector<int>& prompt, int keep, const Sampling& sampling, const Schedule& schedule,
                                const Limits& limits, uint64_t epoch, bool report_drafts, const Oracle& oracle) {
    if (keep > stage_.length()) throw std::runtime_error("there are not so many rows to keep");
    begin(keep, limits.end, sampling);
    stage_.set_oracle(oracle);
    auto remote = std::make_unique<Remote>(&stage_, model_.model->shape.hidden_size, kPassRows, schedule, limits,
                                           sampling.seed, epoch, report_drafts,
                                           !model_.model->exit_feedback.distances.empty());
    remote->begin(prompt, keep, settings_of(sampling, limits.end));
    return remote;
  }
  void pin() { team_.pin_caller(); }
  int hidden() const { return model_.model->shape.hidden_size; }
  int length() const { return stage_.length(); }

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
  void begin(int keep, int end, const Sampling& sampling) {
    reserve(end);
    stage_.begin(sampling, keep);
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
  using Rows = py::array_t<float, py::array::c_style>;

  explicit PyShares(const PyModel& model) : model(model), shares(*model.model) {}
  void reserve(int capacity) { shares.reserve(capacity); }
  void attention(int layer, const Rows& x, int start, Rows part) {
    check(x, part);
    const float* from = x.data();
    float* to = part.mutable_data();
    const int rows = int(x.shape(0));
    const py::gil_scoped_release release;
    shares.attention(layer, from, rows, start, to);
  }
  void mlp(int layer, const Rows& x, Rows part) {
    check(x, part);
    const float* from = x.data();
    float* to = part.mutable_data();
    const int rows = int(x.shape(0));
    const py::gil_scoped_release release;
    shares.mlp(layer, from, rows, to);
  }
  std::pair<float, int> best(const Rows& x) {
    if (x.size() != model.model->shape.hidden_size) throw std::runtime_error("one row is wanted");
    const float* from = x.data();
    const py::gil_scoped_release release;
    const Candidate candidate = shares.best(from);
    return {candidate.score, candidate.id};
  }
  void check(const Rows& x, const Rows& part) const {
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

  py::class_<CpuStation>(m, "Station")
      .def(py::init<const PyModel&, int, int, std::vector<int>, int, double>(), py::arg("model"), py::arg("first"),
           py::arg("last"), py::arg("cores"), py::arg("threads"), py::arg("delay"))
      .def("post", &CpuStation::post, py::arg("message"))
      .def("announce", &CpuStation::announce, py::arg("epoch"), py::arg("sent"), py::call_guard<py::gil_scoped_release>())
      .def("work", &CpuStation::work, py::arg("out"), py::arg("milliseconds"))
      .def("pin", &CpuStation::pin)
      .def("close", &CpuStation::close)
      .def("busy_seconds", &CpuStation::busy_seconds)
      .def("counts", &CpuStation::counts)
      .def("time_pass", &CpuStation::time_pass, py::arg("rows"), py::arg("context"), py::call_guard<py::gil_scoped_release>());

  py::class_<CpuDrafter>(m, "Drafter")
      .def(py::init<const PyModel&, std::vector<int>, int>(), py::arg("model"), py::arg("cores"), py::arg("threads"))
      .def("pin", &CpuDrafter::pin)
      .def("length", &CpuDrafter::length)
      .def("time_step", &CpuDrafter::time_step, py::arg("draw"), py::arg("context"), py::call_guard<py::gil_scoped_release>())
      .def(
          "start",
          [](CpuDrafter& drafter, const std::vector<int>& prompt, int keep, const py::dict& sampling,
             const py::dict& schedule, const Limits& limits, uint64_t epoch, bool report_drafts, const py::object& oracle) {
            Sampling s;
            s.temperature = sampling["temperature"].cast<float>();
            s.top_k = sampling["top_k"].cast<int>();
            s.top_p = sampling["top_p"].cast<float>();
            s.min_p = sampling["min_p"].cast<float>();
            s.repetition_penalty = sampling["repetition_penalty"].cast<float>();
            s.seed = sampling["seed"].cast<uint64_t>();
            Oracle o;
            if (!oracle.is_none()) {
              const auto [truth, acceptance, seed] = oracle.cast<std::tuple<std::vector<int>, double, uint64_t>>();
              o = {truth, acceptance, seed};
            }
            return PyRemote{drafter.start(prompt, keep, s, schedule_of(schedule), limits, epoch, report_drafts, o),
                            drafter.hidden()};
          },
          py::keep_alive<0, 1>(), py::arg("prompt"), py::arg("keep"), py::arg("sampling"), py::arg("schedule"),
          py::arg("limits"), py::arg("epoch"), py::arg("report_drafts") = false, py::arg("oracle") = py::none());

  py::class_<PyShares>(m, "LayerShares")
      .def(py::init<const PyModel&>(), py::arg("model"))
      .def("reserve", &PyShares::reserve, py::arg("capacity"))
      .def("attention", &PyShares::attention, py::arg("layer"), py::arg("x"), py::arg("start"), py::arg("part"))
      .def("mlp", &PyShares::mlp, py::arg("layer"), py::arg("x"), py::arg("part"))
      .def("best", &PyShares::best, py::arg("x"));

  py::class_<PyRemote>(m, "Remote")
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
