"""An EAGLE-3 head beside the passes of a GPU. Torch computes it, by the twin of reference/passes.py: it is one layer
beside a model that has dozens. Its keys and values lie in the loop's pages, in memory of its own."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..models.eagle3 import Eagle3File
from ..models.exit_head import Eagle3Head
from ..reference.passes import Stack, Where, eagle_rows, same_rows
from .weights import DeviceWeights


class Eagle:
    def __init__(self, file: Eagle3File, weights: DeviceWeights) -> None:
        """weights: of its model, whose type and device it has."""
        like = weights.embedding
        self.head = head = Eagle3Head.from_file(file, like)
        self._embedding, self.taps = like, head.eagle.taps
        self.own = Stack(list(head.layers), file.eagle.layer, like)
        self.bytes = sum(weight.nbytes for weight in head.parameters())
        self.draft_ids = [] if head.draft_ids is None else head.draft_ids.tolist()
        # Ids of the text may be drafted where its LM head holds the model's own rows.
        self.follows = head.draft_ids is not None and same_rows(
            head.lm_head.weight, weights.lm_head.rows(head.draft_ids).wide()
        )

    @torch.inference_mode()
    def rows(self, texts: Sequence[Where], ids: Sequence[int], x: Tensor, verified: bool) -> Tensor:
        """As TorchPasses.eagle: x [rows, taps * hidden], or [rows, hidden] -> [rows, hidden]."""
        x = x.to(self._embedding)
        return eagle_rows(self.head, self.own, self._embedding, texts, ids, x, verified).float()

    @torch.inference_mode()
    def logits(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """What rows [n, hidden] came to -> behind the final norm; logits [n, draft vocabulary]. Each row by itself, for
        drafts of one text must not depend on others."""
        normed = self.head.norm(x.to(self._embedding))
        return normed.float(), torch.cat([self.head.lm_head(row[None]) for row in normed]).float()
