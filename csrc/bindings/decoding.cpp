// Many answers at once: the loop, in a thread of its own or stepped by hand.
#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <optional>

#include "../loop/text_stages.h"
#include "bindings.h"

namespace py = pybind11;
using namespace ppsd;
using namespace ppsd::bindings;

namespace {

using PyAnswerEvents = PyAnswer<AnswerEvents>;

PyLoop make_loop(const PyModel& model, int threads, size_t kv_bytes, int most_answers, int prompt_rows, bool stepped,
                 std::vector<int> keep, std::optional<std::vector<int>> cuts, double prior, std::vector<double> learned) {
  PyLoop made{model, nullptr, nullptr};
  const py::gil_scoped_release release;
  auto passes = std::make_unique<CpuPasses>(model.model, make_shared_team(threads), keep);
  const int blocks = int(std::min(kv_bytes / passes->block_bytes(), size_t(1) << 24));
  auto loop = std::make_unique<Loop>(std::move(passes), blocks, LoopLimits{most_answers, prompt_rows, std::move(cuts), prior, std::move(learned)});
  if (stepped) made.stepped.reset(loop.release());
  else made.thread.reset(new LoopThread(std::move(loop)));
  return made;
}

PyLoop make_loop_of_passes(py::object passes, int blocks, int most_answers, int prompt_rows) {
  PyLoop made{{}, nullptr, nullptr};
  auto own = passes_of(std::move(passes));
  const py::gil_scoped_release release;
  made.thread.reset(new LoopThread(std::make_unique<Loop>(std::move(own), blocks, LoopLimits{most_answers, prompt_rows})));
  return made;
}

// Of rank 0.
PyLoop make_loop_over_ranks(const PyModel& model, std::vector<int> cores, int threads, int stages, int blocks, int most_answers,
                            int prompt_rows) {
  PyLoop made{model, nullptr, nullptr};
  const py::gil_scoped_release release;
  auto early = std::make_unique<CpuPasses>(model.model, std::make_unique<Team>(threads, std::move(cores)), std::vector<int>(), false);
  made.stepped.reset(new Loop(std::move(early), blocks, LoopLimits{most_answers, prompt_rows}, stages));
  return made;
}

// Blocks and a file, see Blocks::write and Blocks::read.
template <auto work>
int at_blocks(PyLoop& loop, int file, int64_t at, int count) {
  if (!loop.thread) throw std::logic_error("this loop has no thread of its own");
  Loop& made = loop.loop();
  const py::gil_scoped_release release;
  return made.between_rounds([=](Blocks& blocks) { return (blocks.*work)(file, at, count); });
}

Chain& chain_of(PyLoop& loop) {
  if (Chain* chain = loop.loop().ranks()) return *chain;
  throw std::logic_error("this loop has no other ranks");
}

PyAnswerEvents add(PyLoop& loop, std::vector<int> prompt, const Sampling& sampling, const Schedule& schedule, const Limits& limits,
             bool automatic, bool report_drafts,
             const std::optional<std::pair<py::object, py::object>>& masks, const std::optional<OwnedNgrams>& ngrams,
             const std::optional<Oracle>& oracle, bool trace, int grammar, bool kept) {
  if (prompt.empty()) throw std::invalid_argument("an answer begins with a prompt");
  Request request;
  request.prompt = std::move(prompt);
  request.sampling = sampling;
  if (masks) {
    request.sampling.draft_mask = token_mask_of(masks->first);
    request.sampling.mask = token_mask_of(masks->second);
  }
  request.schedule = schedule;
  request.limits = limits;
  request.ngrams = ngrams.value_or(OwnedNgrams());
  request.report_drafts = report_drafts;
  request.kept = kept;
  if (oracle) request.oracle = *oracle;
  PyAnswerEvents answer;
  if (trace)   // over ranks by the clock of the others
    request.trace = answer.trace = std::make_shared<Trace>(loop.loop().ranks() ? Trace::Clock::time_point() : Trace::Clock::now());
  const std::shared_ptr<AnswerEvents> out = loop.loop().add(std::move(request), automatic, grammar);
  // An answer that nobody holds ends; after a fork it is left alone, with the locks that others may have held.
  auto* held = new std::shared_ptr<AnswerEvents>(out);
  answer.session = {out.get(), [held, made = forks()](AnswerEvents*) {
                      if (made != forks()) return;
                      (*held)->cancel();
                      delete held;
                    }};
  return answer;
}

// What there is by now, without waiting: (events, over).
py::tuple take(PyAnswerEvents& answer) {
  py::list events;
  for (;;) {
    Event event;
    double seconds = 0.0;
    const auto status = answer.session->next(0, &event, &seconds);
    if (status != AnswerEvents::Status::kEvent) return py::make_tuple(events, status == AnswerEvents::Status::kEnded);
    events.append(event_of(event, seconds));
  }
}

void bind_ngrams(py::module_& m) {
  py::class_<OwnedNgrams>(m, "Ngrams")
      .def(py::init([](size_t bytes, uint32_t clock) { return OwnedNgrams{std::make_shared<Ngrams>(bytes, clock)}; }),
           py::arg("bytes") = Ngrams::kBytes, py::arg("clock") = uint32_t(1) << 31)
      .def("of", [](const OwnedNgrams& ngrams, std::optional<uint64_t> owner) { return OwnedNgrams{ngrams.all, owner}; }, py::arg("owner"))
      .def("know", [](const OwnedNgrams& ngrams, const py::array_t<int32_t, py::array::c_style | py::array::forcecast>& rows) {
             if (rows.ndim() != 2 || rows.shape(1) != 4) throw std::invalid_argument("rows of four numbers each");
             std::vector<std::array<int, 4>> counted;
             for (py::ssize_t i = 0; i < rows.shape(0); ++i)
               counted.push_back({rows.at(i, 0), rows.at(i, 1), rows.at(i, 2), rows.at(i, 3)});
             ngrams.all->know(counted);
           }, py::arg("counted"))
      .def("learn", [](const OwnedNgrams& ngrams, const std::vector<int>& tokens) {
             const py::gil_scoped_release release;
             ngrams.all->learn(tokens, 0, 0, ngrams.all->begin(ngrams.owner.value()));
           }, py::arg("tokens"));
}

// The stages of one text, for a loop in Python.
void bind_stages(py::module_& m) {
  const py::call_guard<py::gil_scoped_release> release;
  py::class_<TextStages>(m, "Stages")
      .def(py::init([](const PyModel& model, int threads, const Sampling& sampling) {
             return std::make_unique<TextStages>(std::make_unique<CpuPasses>(model.model, make_shared_team(threads)), sampling);
           }),
           py::keep_alive<1, 2>(), py::arg("model"), py::arg("threads"), py::arg("sampling"))
      .def_static("of_passes", [](py::object passes, const Sampling& sampling) {
             return std::make_unique<TextStages>(passes_of(std::move(passes)), sampling);
           }, py::arg("passes"), py::arg("sampling"))
      .def("begin", &TextStages::begin, release, py::arg("answer"), py::arg("key"))
      .def("reserve", &TextStages::reserve, release, py::arg("capacity"))
      .def("draft", &TextStages::draft, release, py::arg("start"), py::arg("ids"), py::arg("draw"))
      .def("verify", &TextStages::verify, release, py::arg("start"), py::arg("ids"), py::arg("last"))
      .def("learn", &TextStages::learn, release, py::arg("position"));
}

}  // namespace

void bind_decoding(py::module_& m) {
  bind_ngrams(m);
  bind_stages(m);
  m.def("pass_words", &most_pass_words, py::arg("hidden"), py::arg("taps") = 0);
  py::class_<Notifier, std::shared_ptr<Notifier>>(m, "Notifier")
      .def(py::init<>())
      .def_property_readonly("descriptor", &Notifier::descriptor)
      .def("clear", &Notifier::clear);

  bind_answer<AnswerEvents>(m, "LoopAnswer")
      .def("ready", &PyAnswerEvents::ready, py::arg("milliseconds"))
      .def("prompt_rows", &PyAnswerEvents::prompt_rows)
      .def("tell_by", [](PyAnswerEvents& answer, std::shared_ptr<Notifier> notifier) {
        if (answer.session && answer.here()) answer.session->tell_by(std::move(notifier));
      }, py::arg("notifier"))
      .def("take", &take)
      .def("kept", [](PyAnswerEvents& answer) {
        if (!answer.session) throw std::logic_error("this answer has been closed");
        return py::array_t<uint16_t>(py::ssize_t(answer.session->kept.size()), answer.session->kept.data());
      });

  py::class_<PyLoop>(m, "Loop")
      .def(py::init(&make_loop), py::arg("model"), py::arg("threads"), py::arg("kv_bytes"), py::arg("most_answers"),
           py::arg("prompt_rows"), py::arg("stepped") = false, py::arg("keep") = std::vector<int>(), py::arg("cuts") = py::none(),
           py::arg("prior") = 0.5, py::arg("learned") = std::vector<double>())
      .def("learned", [](PyLoop& loop) { return loop.loop().learned(); })
      .def("explain", [](PyLoop& loop) { return loop.loop().explain(); })
      .def("add", &add, py::keep_alive<0, 1>(), py::arg("prompt"), py::arg("sampling"), py::arg("schedule"),
           py::arg("limits"), py::arg("automatic") = false, py::arg("report_drafts") = false,
           py::arg("masks") = py::none(), py::arg("ngrams") = py::none(),
           py::arg("oracle") = py::none(), py::arg("trace") = false, py::arg("grammar") = 0, py::arg("kept") = true)
      .def(
          "end",
          [](PyLoop& loop) {
            const py::gil_scoped_release release;
            if (loop.thread) loop.thread->end();
          })
      .def(
          "step",
          [](PyLoop& loop) {
            if (!loop.stepped) throw std::logic_error("this loop has a thread of its own");
            Loop& made = loop.loop();
            const py::gil_scoped_release release;
            return made.step();
          })
      .def("write_blocks", &at_blocks<&Blocks::write>, py::arg("file"), py::arg("at"), py::arg("most"))
      .def("read_blocks", &at_blocks<&Blocks::read>, py::arg("file"), py::arg("at"), py::arg("count"))
      .def_static("of_passes", &make_loop_of_passes, py::arg("passes"), py::arg("blocks"), py::arg("most_answers"), py::arg("prompt_rows"))
      .def_static("over_ranks", &make_loop_over_ranks, py::arg("model"), py::arg("cores"), py::arg("threads"), py::arg("stages"),
                  py::arg("blocks"), py::arg("most_answers"), py::arg("prompt_rows"))
      .def(
          "work",
          [](PyLoop& loop, py::array_t<int32_t, py::array::c_style> out, int milliseconds) {
            chain_of(loop);
            Loop& made = loop.loop();
            if (size_t(out.size()) < most_pass_words(made.model().shape.hidden_size, made.taps()))
              throw std::runtime_error("a pass does not fit");
            int32_t* place = out.mutable_data();
            const py::gil_scoped_release release;
            return made.work(place, milliseconds);
          },
          py::arg("out"), py::arg("milliseconds"))
      .def(
          "draft_with",
          [](PyLoop& loop, const PyModel& model) {
            chain_of(loop);
            const py::gil_scoped_release release;
            return loop.loop().draft_with(model.model);
          },
          py::arg("model"))
      .def(
          "land",
          [](PyLoop& loop, const py::array_t<int32_t, py::array::c_style>& verdict) {
            Chain& chain = chain_of(loop);
            const int32_t* words = verdict.data();
            const size_t count = size_t(verdict.size());
            const py::gil_scoped_release release;
            chain.land(words, count);
          },
          py::arg("verdict"))
      .def(
          "fail",
          [](PyLoop& loop, const std::string& line) {
            chain_of(loop);
            Loop& made = loop.loop();
            const py::gil_scoped_release release;
            made.end_all(std::make_exception_ptr(std::runtime_error(line)));
          },
          py::arg("line"))
      .def_property_readonly("block_bytes", [](PyLoop& loop) { return loop.loop().block_bytes(); })
      .def_property_readonly("capacity", [](PyLoop& loop) { return loop.loop().capacity(); })
      .def_property_readonly("counts", [](PyLoop& loop) {
        using py::literals::operator""_a;
        const LoopCounts counts = loop.loop().counts();
        return py::dict("rounds"_a = counts.rounds, "rows"_a = counts.rows, "draft_rows"_a = counts.draft_rows,
                        "prompt_rows"_a = counts.prompt_rows, "shared_rows"_a = counts.shared_rows,
                        "preempted"_a = counts.preempted, "overlapped"_a = counts.overlapped);
      });
}
