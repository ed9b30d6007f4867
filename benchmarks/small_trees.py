"""Would small trees of drafts pay over chains with siblings? Simulated from what a head drafts on held-out answers.

    python benchmarks/small_trees.py HEAD --text text --rows 0.014 0.05

HEAD: a folder of train_eagle3.py, or a file of `ppsd-run distill`. --text: the folder that it was trained on, with the
states of its layers. Recorded is which of the head's choices the text takes, 1st, 2nd or 3rd, in every place after
every token. A node of a tree is a path of choices; it is accepted where the text takes that path, so that the best tree
of so many nodes is the nodes that the text takes most often. Each family of trees has its best size and depth.

Costs: measured here, and made up, with `--rows`: what each further row adds to a pass, in plain tokens. A step that
drafts for several rows costs as much as one row (`free`), or as many as it drafts for (`dear`).
"""

import argparse
import json
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from eagle3_trainer import STEPS, EagleTrainer
from made_up_costs import one_machine

from ppsd_rt import Engine
from ppsd_rt._native import StageCosts
from ppsd_rt.cli.info import machine
from ppsd_rt.distill.run import HELD_OUT
from ppsd_rt.distill.shards import Text, read_shard
from ppsd_rt.distill.train import Trainer, TrainSettings
from ppsd_rt.find_head import find_head
from ppsd_rt.models.checkpoint import Checkpoint
from ppsd_rt.models.eagle3 import Eagle3File
from ppsd_rt.models.eagle3_head import Eagle3Head
from ppsd_rt.models.exit_head import ExitHead
from ppsd_rt.models.resolve import resolve_model
from ppsd_rt.reference.backend import TorchBackend

Choices = tuple[int, ...]  # of choices: 0 the best
MOST = 15  # drafts of a pass
# Which paths a family may hold: the last choice of one beside a chain is a sibling.
FAMILIES: dict[str, Callable[[Choices], bool]] = {
    "chain": lambda path: max(path) == 0,
    "siblings": lambda path: not any(path[:-1]) and path[-1] < 2,
    "tree": lambda path: max(path[:2]) < 3 and not any(path[2:]),
    "tree and siblings": lambda path: max(path[:2]) < 3 and not any(path[2:-1]) and (path[-1] < 2 or len(path) < 3),
}


@torch.no_grad()
def recorded(trainer: Trainer, texts: Sequence[Text]) -> Counter[Choices]:
    """How often the text takes a path of the head's first three choices."""
    taken: Counter[Choices] = Counter()
    for text in texts:
        places = eagle_choices(trainer, text) if isinstance(trainer, EagleTrainer) else own_choices(trainer, text)
        for start in range(len(places[0]) - STEPS + 1):
            path: Choices = ()
            for place in range(STEPS):
                path += (places[place][start + place],)
                if path[-1] == 3:
                    break
                taken[path] += 1
            taken[()] += 1
    return taken


def choice(trainer: Trainer, logits: torch.Tensor, true: torch.Tensor) -> list[int]:
    """Of each row, which of the best three is right; 3: none."""
    hits = trainer._ids[logits.topk(3).indices] == true[:, None]
    return torch.cat((hits, torch.ones(len(hits), 1, dtype=torch.bool)), dim=1).float().argmax(1).tolist()


def eagle_choices(trainer: EagleTrainer, text: Text) -> list[list[int]]:
    outputs, _, true = trainer._outputs([text])
    return [choice(trainer, trainer._head_logits(output), true) for output in outputs]


def own_choices(trainer: Trainer, text: Text) -> list[list[int]]:
    """All rows stand equally far from verified text, which changes what a row attends to a little."""
    ids, rows = trainer._pad([text])
    rows[:, :STEPS] = False
    exits, last = trainer._teacher([text], ids)
    true = ids.roll(-1, 1)[rows]
    found = []
    for place in range(1, STEPS + 1):
        hidden = trainer._student(trainer.heads[0], exits, last, torch.full(ids.shape, place))[rows]
        found.append(choice(trainer, trainer._logits(hidden), true))
    return found


def seconds(costs: StageCosts, nodes: Sequence[Choices], dear: bool) -> float:
    depth = max(map(len, nodes))
    parents = {path[:-1] for path in nodes if len(path) > 1}
    more_drafts = len(parents) - (depth - 1) if dear else 0
    more_rows = costs.verify[len(nodes)] - costs.verify[depth]
    # Early layers take the rows together as the others do.
    more_rows *= 1.0 + costs.row_step / costs.verify[0]
    return costs.round(depth) + more_rows + more_drafts * costs.draft_step


def best(taken: Counter[Choices], family: str, costs: StageCosts, dear: bool) -> dict[str, float]:
    """Of all sizes and depths, what is fastest: times plain decoding."""
    cases = []
    for depth in range(1, STEPS + 1):
        fitting = [(count, path) for path, count in taken.items() if 0 < len(path) <= depth and FAMILIES[family](path)]
        order = [path for _, path in sorted(fitting, key=lambda each: (-each[0], each[1]))][:MOST]
        for size in range(1, len(order) + 1):
            nodes = order[:size]
            tokens = 1 + sum(taken[path] for path in nodes) / taken[()]
            cases.append((tokens * costs.plain_step / seconds(costs, nodes, dear), size, max(map(len, nodes)), tokens))
    return dict(zip(("speed", "drafts", "depth", "tokens"), max(cases), strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("head")
    parser.add_argument("-m", "--model", default="smollm2-135m")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--rows", type=float, nargs="*", default=[0.014, 0.05])
    parser.add_argument("--draft", type=float, default=0.08, help="a made-up draft, in plain tokens [0.08]")
    args = parser.parse_args()

    checkpoint = Checkpoint(resolve_model(args.model))
    model = TorchBackend(checkpoint, "auto", "cpu", None).model
    file = find_head(args.head, checkpoint)
    texts = [text for text in read_shard(args.text, HELD_OUT) if text.greedy]
    if isinstance(file, Eagle3File):
        trainer = EagleTrainer(model, [Eagle3Head.from_file(file, model)], texts, TrainSettings(), 1)
    else:
        trainer = Trainer(model, [ExitHead.from_file(file, model)], texts, TrainSettings(), 1)
    taken = recorded(trainer, texts)
    engine = Engine.from_pretrained(args.model, backend="cpu", dtype="int8", exit_head=args.head)
    costs = {"measured": engine.backend.costs(again=True).turns}
    costs |= {f"made up, row {row}": one_machine(args.draft, row) for row in args.rows}
    found = {
        name: {
            f"{family}{', dear' if dear else ''}": best(taken, family, cost, dear)
            for family in FAMILIES
            for dear in (False, True)
        }
        for name, cost in costs.items()
    }
    for name, families in found.items():
        print(name)
        for family, facts in families.items():
            print(f"  {family:26}" + " ".join(f"{key} {value:.3f}" for key, value in facts.items()))
    measured = costs["measured"]
    rows = {"pass_of_8_of_1": measured.verify[7] / measured.verify[0], "draft": measured.draft_share(4)}
    shares = {str(path): round(count / taken[()], 4) for path, count in taken.most_common(40)}
    print(
        json.dumps(
            {"head": args.head, "answers": len(texts), **rows, "found": found, "taken": shares, "machine": machine()}
        )
    )


if __name__ == "__main__":
    main()
