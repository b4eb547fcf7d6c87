"""What llama.cpp makes of a GGUF file: logits and token ids, asked on stdin and answered on stdout as JSON.

Run by an interpreter that has llama-cpp-python; imports nothing of gptkit.
"""

import json
import sys

import llama_cpp

FP32 = 0  # ggml's number; keys and values are kept as F16 unless told


def main() -> None:
    asked = json.load(sys.stdin)
    answer: dict = {"logits": [], "tokens": [], "texts": []}
    for run in asked["runs"]:
        model = llama_cpp.Llama(
            asked["model"],
            n_ctx=max(len(asked["ids"]), 1),
            n_batch=run["batch"],
            n_ubatch=run["batch"],
            n_threads=run["threads"],
            n_threads_batch=run["threads"],
            type_k=FP32,
            type_v=FP32,
            flash_attn=run.get("flash", False),
            logits_all=True,
            verbose=False,
        )
        if asked["ids"]:
            model.eval(asked["ids"])
            answer["logits"].append(model.scores[: len(asked["ids"])].tolist())
    for text in asked.get("texts", []):
        ids = model.tokenize(text.encode(), add_bos=True, special=True)
        answer["tokens"].append(ids)
        answer["texts"].append(model.detokenize(ids, special=True).decode(errors="replace"))
    json.dump(answer, sys.stdout)


if __name__ == "__main__":
    main()
