"""Records what an exit head drafts along greedy answers, for tests/ppsd_rt/planning/test_recorded.py.

python benchmarks/record_answers.py tests/ppsd_rt/planning/recorded_answers.npz --tokens 96
"""

import argparse

import numpy as np

from ppsd_rt import Engine, SamplingParams
from ppsd_rt.lab.cli.prompt_files import read_prompts

PLACES = 8  # drafts of a round that are recorded
NONE = 65535  # there is no such draft


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file")
    parser.add_argument("--tokens", type=int, default=96)
    args = parser.parse_args()
    engine = Engine.from_pretrained()
    params = SamplingParams(max_tokens=args.tokens)
    stages = engine.stages(params)
    prompts, answers, ids, sure = [], [], [], []
    for prompt in read_prompts(None):
        answer = engine.generate(prompt.content, params, "plain").run().ids
        stages.prefill(prompt.content)
        prompts.append(stages.tokens)
        answers.append(answer)
        for token in range(len(answer)):
            drafts = [stages.draft([row]) for row in answer[token : token + PLACES]]
            missing = PLACES - len(drafts)
            ids.append([draft.token for draft in drafts] + missing * [NONE])
            sure.append([round(255 * draft.confidence) for draft in drafts] + missing * [0])
            stages.roll_back(len(prompts[-1]) + token)
            stages.verify([answer[token]])
            stages.commit(1)
    np.savez_compressed(
        args.file,
        prompts=np.concatenate(prompts).astype(np.uint16),
        prompt_lengths=[len(prompt) for prompt in prompts],
        answers=np.concatenate(answers).astype(np.uint16),
        answer_lengths=[len(answer) for answer in answers],
        drafts=np.array(ids, np.uint16),
        confidences=np.array(sure, np.uint8),
    )


if __name__ == "__main__":
    main()
