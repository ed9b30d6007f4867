"""Writes tests/models/golden/eagle3.npz: what other programs draft with the heads of tests/eagle_support.py.

The layout `speculators` runs in that package's own Eagle3DraftModel, SafeAILab's in the eagle/model/cnets.py of
github.com/SafeAILab/EAGLE. Neither installs beside our pins, so this runs in an environment of its own:

    python3 -m venv /tmp/eagle && /tmp/eagle/bin/pip install speculators==0.9.0
    git clone https://github.com/SafeAILab/EAGLE /tmp/EAGLE
    PYTHONPATH=tests /tmp/eagle/bin/python tests/models/eagle3_golden.py /tmp/EAGLE

Of each case and context: six draft ids [contexts, 6], each fed to the next step, and their logits [contexts, 6, draft].
"""

import importlib.util
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from eagle_support import CASES, config_of, contexts, draft_ids, embedding, tensors_of, write_eagle3

STEPS, CONTEXTS = 6, 4
OUT = Path(__file__).parent / "golden" / "eagle3.npz"


def by_speculators(case):
    """chain(ids, states) -> draft ids, logits."""
    from speculators import SpeculatorModelConfig
    from speculators.models.eagle3 import Eagle3DraftModel

    with tempfile.TemporaryDirectory() as folder:
        write_eagle3(Path(folder), case)
        config = SpeculatorModelConfig.from_pretrained(folder)
    config.transformer_layer_config._attn_implementation = "eager"
    model = Eagle3DraftModel(config).eval()
    state = {name: torch.from_numpy(tensor) for name, tensor in tensors_of(case).items()}
    state.setdefault("embed_tokens.weight", torch.from_numpy(embedding()))
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected and set(missing) <= {"verifier_norm.weight", "verifier_lm_head.weight"}, (missing, unexpected)
    seen = []
    model.lm_head.register_forward_hook(lambda _, __, logits: seen.append(logits))

    def chain(ids, states):
        rows, drafted, logits = len(states), [], []
        for step in range(STEPS):
            # Its step k at row i reads the id that stands k places later: so the drafts follow the text.
            shifted = torch.tensor([[*ids[1:], *drafted]])
            padded = torch.cat((torch.from_numpy(states), torch.zeros(step, states.shape[1])))[None]
            seen.clear()
            model(padded, shifted, torch.zeros_like(shifted), ttt_steps=step + 1)
            logits.append(seen[step][0, rows - 1])
            place = int(logits[-1].argmax())
            drafted.append(place + (int(model.d2t[place]) if model.d2t is not None else 0))
        return drafted, torch.stack(logits)

    return chain


def by_safeailab(case, repository):
    """The same."""
    folder = Path(repository) / "eagle" / "model"
    sys.path.insert(0, str(folder))
    spec = importlib.util.spec_from_file_location("cnets", folder / "cnets.py")
    cnets = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(cnets)
    settings = {"pad_token_id": 0, "pretraining_tp": 1, "rope_scaling": None, **config_of(case)}
    model = cnets.Model(SimpleNamespace(**settings)).eval()
    state = {name: torch.from_numpy(tensor) for name, tensor in tensors_of(case).items()}
    state.setdefault("embed_tokens.weight", torch.from_numpy(embedding()))
    state["midlayer.self_attn.rotary_emb.inv_freq"] = model.midlayer.self_attn.rotary_emb.inv_freq
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert set(missing) <= {"d2t", "t2d"} and set(unexpected) <= {"midlayer.self_attn.rotary_emb.inv_freq"}

    def chain(ids, states):
        drafted, logits = [], []
        model.reset()
        hidden, cache = model(torch.from_numpy(states)[None], torch.tensor([ids[1:]]), use_cache=True)
        for _ in range(STEPS):
            last = hidden[:, -1:]
            logits.append(model.lm_head(model.norm(last))[0, 0])
            place = int(logits[-1].argmax())
            drafted.append(place + int(model.d2t[place]))
            hidden, cache = model(last, torch.tensor([drafted[-1:]]), past_key_values=cache, use_cache=True)
        return drafted, torch.stack(logits)

    return chain


def main(repository):
    golden = {}
    with torch.inference_mode():
        for number, case in enumerate(CASES):
            chain = by_safeailab(case, repository) if case.startswith("safeailab") else by_speculators(case)
            chains = [chain(ids.tolist(), states) for ids, states in contexts(case, CONTEXTS)]
            golden[f"ids{number}"] = np.array([ids for ids, _ in chains], np.int32)
            golden[f"logits{number}"] = np.stack([logits.numpy() for _, logits in chains]).astype(np.float32)
            assert np.isin(golden[f"ids{number}"], draft_ids(case)).all()
            print(case, len(np.unique(golden[f"ids{number}"])), "ids drafted")
    OUT.parent.mkdir(exist_ok=True)
    np.savez_compressed(OUT, **golden)
    print(OUT, OUT.stat().st_size, "bytes")


if __name__ == "__main__":
    main(sys.argv[1])
