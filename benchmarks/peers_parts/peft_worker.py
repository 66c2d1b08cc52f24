"""transformers and PEFT behind the channel: one batch without padding, `adapter_names` per request.

    python -m benchmarks.peers_parts.peft_worker SOCKET

The base model is a second model without PEFT's wrappers.
"""

import warnings
from typing import Any

import peft
import torch
import transformers
from transformers import LlamaForCausalLM

from benchmarks.peers_parts.channel import Answer, serve


def open_peer(setup: dict[str, Any]) -> tuple[Answer, dict[str, Any]]:
    warnings.simplefilter("ignore")
    torch.set_num_threads(setup["threads"])
    base = LlamaForCausalLM.from_pretrained(setup["checkpoint"], dtype="auto").eval()
    wrapped = LlamaForCausalLM.from_pretrained(setup["checkpoint"], dtype="auto")
    first, *others = setup["adapters"]
    options = {"autocast_adapter_dtype": False}  # else bf16 adapters are computed in fp32
    mixed = peft.PeftModel.from_pretrained(wrapped, first, adapter_name="a0", **options).eval()
    for number, path in enumerate(others, start=1):
        mixed.load_adapter(path, f"a{number}", **options)

    def answer(job: dict[str, Any]) -> list[list[int]]:
        tokens = torch.tensor(job["prompts"])
        wanted = {
            "input_ids": tokens, "attention_mask": torch.ones_like(tokens), "do_sample": False,
            "max_new_tokens": job["output_tokens"], "min_new_tokens": job["output_tokens"],
        }  # fmt: skip
        with torch.inference_mode():
            if job["adapters"][0] is None:
                output = base.generate(**wanted)
            else:
                names = [f"a{number}" for number in job["adapters"]]
                output = mixed.generate(**wanted, adapter_names=names)
        return output[:, tokens.shape[1] :].tolist()

    versions = f"transformers {transformers.__version__}, peft {peft.__version__}"
    return answer, {"version": f"{versions}, torch {torch.__version__}", "dtype": str(base.dtype)}


if __name__ == "__main__":
    serve(open_peer)
