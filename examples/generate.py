"""Answer a question with the included runtime: a real model of 135 M parameters, on any CPU.

    make ask QUESTION="What is the capital of France?"

Several ranks work the same way: EngineSettings(tp=3), or pp=2, or both. In bfloat16 this small model's first token is a
near-tie (logits of 25.33 and 25.24), and the answer may be another.
"""

from __future__ import annotations

import sys

from runtime.load import load_engine
from runtime.sampling import Sampling
from runtime.settings import EngineSettings


def main(question: str) -> None:
    """Print the answer as it comes."""
    engine = load_engine("smollm2", EngineSettings(dtype="float32", kv_blocks=512))
    tokenizer = engine.tokenizer
    assert tokenizer is not None
    prompt = tokenizer.encode(tokenizer.chat([{"role": "user", "content": question}]), add_special=False)
    engine.add(prompt, Sampling(max_tokens=256))
    while engine.unfinished:
        for delta in engine.step():
            print(delta.text, end="", flush=True)
    print()
    engine.close()


if __name__ == "__main__":  # rank processes import this file: without the guard they would ask again
    main(sys.argv[1] if len(sys.argv) > 1 else "What is the capital of France?")
