"""Tiny models on a device, and what the torch reference and the verdicts' records say of them."""

import random

import torch
from kernel_support import DEVICE
from support import tiny_model

from ppsd_rt import _native
from ppsd_rt.backend import Oracle
from ppsd_rt.cuda.weights import DeviceWeights
from ppsd_rt.models.exit_head import ExitHead
from ppsd_rt.models.head_file import HeadInfo
from ppsd_rt.pipeline.rounds import Limits
from ppsd_rt.pipeline.schedule import PLAIN
from ppsd_rt.reference.passes import TorchPasses
from ppsd_rt.triton_kernels.state import (
    LOOKAHEAD,
    MOST,
    RECORD_ACCEPTED,
    RECORD_COMMITTED,
    RECORD_IDS,
    RECORD_JUDGED,
    RECORD_POSITION,
    RECORD_ROWS,
    RECORD_SEQUENCE,
    START,
)

VOCAB = 64
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8]  # more than a pass has rows


def model_of(**changes):
    shape = {
        "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2,
        "num_key_value_heads": 1, "vocab_size": VOCAB, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    return tiny_model(**{**shape, **changes})


def head_of(model, kind, exit_layer=1):
    head = ExitHead.from_model(model, HeadInfo(kind, exit_layer, "tiny", "0"))
    if head.feedback is not None:
        generator = torch.Generator().manual_seed(3)
        for name, parameter in head.feedback.named_parameters():
            if name != "norm.weight":
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    return head


def weights_of(model, kind=None, exit_layer=1, draft_ids=None, format="float32", places=()):
    device = places[0] if places else DEVICE
    weights = DeviceWeights.build(model.config, lambda name: model.state_dict()[name], format, device, places)
    if kind is None:
        return weights
    head = head_of(model, kind, exit_layer)
    parameters = dict(head.named_parameters())
    return weights._with(lambda name: parameters[name], head.info, draft_ids)


def plain_of(model, prompt, params, end):
    """The text as the torch reference decodes it plainly."""
    loop = _native.Loop.of_passes(TorchPasses(model, None), end // 64 + 2, 1, 16)
    return [*prompt, *(token for round in loop.add(prompt, params, PLAIN, Limits(end)) for token in round.committed)]


def records_of(stages, first):
    """Of the verdicts from number `first` on, in order."""
    rows = {row[RECORD_SEQUENCE]: row for row in stages.buffers.ring.tolist() if row[RECORD_SEQUENCE] >= first}
    assert sorted(rows) == list(range(first, first + len(rows)))
    return [rows[number] for number in sorted(rows)]


def told(records, prompt):
    """The text that the records tell of."""
    text = list(prompt)
    for record in records:
        count = record[RECORD_COMMITTED]
        if count:
            assert record[RECORD_POSITION] == len(text)
            assert record[RECORD_ACCEPTED] <= record[RECORD_JUDGED] <= record[RECORD_ROWS]
            text += record[RECORD_IDS : RECORD_IDS + count]
    return text


def text_of(stages):
    return stages.buffers.text[: stages.buffers.state[START].item() + 1].tolist()


def decoded_in_any_order(stages, model, params, tokens):
    """So many tokens after PROMPT: plain steps, then drafts by the head, then by an oracle that is right now and then,
    in chunks of every size. The text is plain decoding's -> the verdicts' records."""
    end = len(PROMPT) + tokens
    truth = plain_of(model, PROMPT, params, end)
    stages.begin(PROMPT, params, end=end, oracle=Oracle(tuple(truth), 0.65, seed=38))
    dice, launches = random.Random(stages.weights.head.info.kind), 0
    stages.plain_step()
    stages.plain_step()
    while stages.buffers.state[START].item() < end - 1:
        ahead = dice.choice((2, 3, 4))
        chunks = torch.tensor([dice.choice((1, 3, 15)), dice.choice((2, 15))], dtype=torch.int32)
        stages.buffers.state[MOST : LOOKAHEAD + 1] = chunks
        for _ in range(ahead):
            stages.draft_step()
        if dice.random() < 0.6:
            stages.early_step()
        window = (stages.buffers.state[START].item(), 16)
        for leg in range(len(stages.legs)):
            if leg:
                stages.draft_step()  # while the pass is between two stages, or two devices
            stages.verification(leg, window)
        launches += 1
        assert launches < 40
    assert text_of(stages) == truth
    records = records_of(stages, 1)
    assert told(records, PROMPT) == truth
    judged, accepted = (sum(record[i] for record in records) for i in (RECORD_JUDGED, RECORD_ACCEPTED))
    assert 0 < accepted < judged, "accepted and rejected draft tokens"
    assert launches + 2 == len(records)
    return records
