"""Torch stages over ranks: what a rank holds when it runs `--backend torch`, on a CPU or on a GPU of its own.

The stages are those of ppsd_rt/reference/stage.py.
"""

import os
from collections.abc import Sequence
from typing import Any

import torch

from ..models.checkpoint import Checkpoint
from ..models.exit_head import ExitHead
from ..models.head_file import HeadFile
from ..models.llama import LlamaForCausalLM
from ..pipeline.rounds import Logprob
from ..reference.backend import pick_device, pick_dtype
from ..reference.sampler import Sampler, confidence
from ..reference.stage import DraftStage, Stage, VerifyStage, Void
from ..sampling.grammar import TokenMask
from ..sampling.params import SamplingParams
from .python_stages import TEXT_BLOCKS, Cancelled, PythonDrafter, PythonStation, Rows


def torch_slice(
    checkpoint: Checkpoint,
    layers: tuple[int, int],
    embeds: bool,
    chooses: bool,
    dtype: torch.dtype,
    device: torch.device,
) -> LlamaForCausalLM:
    """The module tree with the weights of layers [first, last) alone. embeds: and the embedding; chooses: and the final
    norm and the LM head. The rest stays on the device `meta`."""
    prefixes = [f"model.layers.{layer}." for layer in range(*layers)]
    tied = checkpoint.config.tie_word_embeddings
    if embeds or (chooses and tied):
        prefixes.append("model.embed_tokens.")
    if chooses:
        prefixes += ["model.norm.", "lm_head."]
    return LlamaForCausalLM.from_checkpoint(checkpoint, dtype, device, tuple(prefixes))


def weight_bytes(model: LlamaForCausalLM) -> int:
    return sum(parameter.nbytes for parameter in model.parameters() if parameter.device.type != "meta")


class _Held:
    """The rows of a text that a stage holds, their ids, and how the next tokens are chosen."""

    def __init__(self, stage: Stage, like: torch.Tensor) -> None:
        """`like` gives the dtype and the device."""
        self._rows, self._like = stage, like
        self._ids: list[int] = []
        self._sampler = Sampler(SamplingParams())

    @property
    def length(self) -> int:
        return self._rows.length

    def begin(self, keep: int, end: int, prompt: int, params: SamplingParams, mask: TokenMask | None = None) -> None:
        """An answer of at most `end` rows, of which `keep` are there already; its prompt has `prompt`. mask: of its
        grammar."""
        self._rows.reserve(end)
        self._rows.rollback(keep)
        del self._ids[keep:]
        self._sampler = Sampler(params, prompt, mask, params.stop_token_ids)

    def _go_on(self, start: int, ids: Sequence[int]) -> None:
        self._rows.rollback(start)
        self._ids[start:] = ids

    def _to_device(self, rows: Rows) -> torch.Tensor:
        return torch.from_numpy(rows).to(self._like.device, self._like.dtype)


class TorchVerify(_Held):
    """Layers [first, last) and, after the last of all, the LM head."""

    def __init__(self, model: LlamaForCausalLM, first: int, last: int) -> None:
        like = next(model.model.layers[first].parameters())
        self._stage = VerifyStage(model, first, last, like)
        self._out = like.new_zeros(0)
        self._said: list[Logprob] = []
        super().__init__(self._stage, like)

    def run(self, start: int, ids: Sequence[int], hidden: Rows, cancelled: Cancelled) -> Rows | None:
        """None: it became void on the way."""
        self._go_on(start, ids)
        try:
            with torch.inference_mode():
                self._out = self._stage.run_while(self._to_device(hidden), cancelled)
                return self._out.float().cpu().numpy()
        except Void:
            return None

    def choose(self, last: int) -> list[int]:
        """The model's own token after each of the last rows that ran."""
        first = self.length - last
        with torch.inference_mode():
            logits = self._stage.choices(self._out[-last:], first)
            choose, logprob = self._sampler.choose, self._sampler.logprob
            ids = [choose(row, place, self._ids[:place]) for place, row in enumerate(logits, first + 1)]
            self._said = [said for row, id in zip(logits, ids, strict=True) if (said := logprob(row, id)) is not None]
            return ids

    def take_logprobs(self) -> list[tuple[float, tuple[tuple[int, float], ...]]]:
        """Of the tokens that `choose` gave last, where the answer asks for them."""
        return [(said.logprob, said.top) for said in self._said]


class TorchDraft(_Held):
    """Layers [0, layers), and the exit head after them; without one nothing is drafted."""

    def __init__(self, model: LlamaForCausalLM, head: ExitHead | None, layers: int) -> None:
        self._stage = DraftStage(model, head, layers)
        super().__init__(self._stage, model.model.embed_tokens.weight)

    def begin(self, keep: int, end: int, prompt: int, params: SamplingParams, mask: TokenMask | None = None) -> None:
        super().begin(keep, end, prompt, params, mask)
        self._stage.begin_vocabulary()

    def learn(self, position: int, hidden: Rows) -> None:
        """What the last layer made of the newest verified row [1, hidden]."""
        self._stage.learn(position, self._to_device(hidden)[0])

    def step(self, start: int, ids: Sequence[int], draw: bool, cancelled: Cancelled) -> tuple[int, float] | None:
        """(draft token, the head's own probability of it), 0s where none is drawn; None: it became void on the way."""
        self._go_on(start, ids)
        try:
            with torch.inference_mode():
                if ids:
                    self._stage.run_tokens(ids, cancelled)
                if not draw:
                    return 0, 0.0
                self._stage.follow(self._ids)
                own_ids = self._stage.draft_ids
                logits = self._sampler.edited(self._stage.draft_logits(), self._ids, own_ids)
                token = self._sampler.pick(logits, self.length, self._ids, own_ids)
                return token, confidence(logits, token, own_ids)
        except Void:
            return None

    def exported(self, start: int, count: int) -> Rows:
        return self._stage.exit_hidden(start, count).float().cpu().numpy()


class TorchSlices:
    """Torch stages: on the GPU that has this rank's number among the host's ranks, or on a CPU."""

    siblings, extras, blocks, answers = False, True, TEXT_BLOCKS, 1

    def __init__(self, device: str, dtype: str, threads: int, cores: list[int], local_rank: int) -> None:
        on_gpu = device == "cuda" or (device == "auto" and torch.cuda.is_available())
        if on_gpu and (count := torch.cuda.device_count()):
            device = f"cuda:{local_rank % count}"
        self._device = pick_device(device)
        self._dtype = pick_dtype(dtype, self._device)
        self.bytes = 0
        torch.set_num_threads(threads)
        if cores:
            os.sched_setaffinity(0, cores)  # of this thread, and of those that torch starts from it

    @property
    def dtype(self) -> str:
        return str(self._dtype).removeprefix("torch.")

    @property
    def kind(self) -> str:
        on_gpu = self._device.type == "cuda"
        return torch.cuda.get_device_name(self._device) if on_gpu else torch.backends.cpu.get_cpu_capability()

    def drafter(self, checkpoint: Checkpoint, head: HeadFile | None, size: int) -> PythonDrafter:
        model = torch_slice(checkpoint, (0, size), True, head is not None, self._dtype, self._device)
        self.bytes = weight_bytes(model)
        config, own = model.config, ExitHead.from_file(head, model) if head else None
        hears = own is not None and own.feedback is not None
        stage = TorchDraft(model, own, size)
        drafter = PythonDrafter(stage, config.hidden_size, config.vocab_size, own is not None, hears)
        self.loop = drafter.loop
        return drafter

    def station(
        self, checkpoint: Checkpoint, first: int, last: int, delay: float, taps: Sequence[int] = ()
    ) -> PythonStation:
        chooses = last == checkpoint.config.num_hidden_layers
        model = torch_slice(checkpoint, (first, last), False, chooses, self._dtype, self._device)
        self.bytes = weight_bytes(model)
        return PythonStation(TorchVerify(model, first, last), model.config.hidden_size, chooses, delay)

    def facts(self) -> dict[str, Any]:
        return {"device": str(self._device)}
