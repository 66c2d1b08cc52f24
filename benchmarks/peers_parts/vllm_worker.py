"""vLLM's own engine behind the channel, in vLLM's environment: its `LLM` class, without HTTP.

    VLLM_PYTHON -m benchmarks.peers_parts.vllm_worker SOCKET

As `vllm serve --enable-lora --max-lora-rank 64 --max-loras 16` is; prefix caching is off, as it is
for every peer. Its "auto" would compute an fp32 checkpoint in bf16, also where that is slow.
"""

from typing import Any

import torch
import vllm
from vllm.lora.request import LoRARequest

from benchmarks.peers_parts.channel import Answer, serve


def open_peer(setup: dict[str, Any]) -> tuple[Answer, dict[str, Any]]:
    engine = vllm.LLM(
        setup["checkpoint"], dtype=setup["dtype"], max_model_len=setup["context"],
        max_num_seqs=setup["requests"], enable_prefix_caching=False, enable_lora=True,
        max_lora_rank=setup["max_rank"], max_loras=len(setup["adapters"]),
        max_cpu_loras=len(setup["adapters"]), disable_log_stats=True, **setup["vllm"],
    )  # fmt: skip
    adapters = [
        LoRARequest(f"a{number}", number + 1, path) for number, path in enumerate(setup["adapters"])
    ]

    def answer(job: dict[str, Any]) -> list[list[int]]:
        wanted = vllm.SamplingParams(
            temperature=0.0, max_tokens=job["output_tokens"], ignore_eos=True, detokenize=False
        )
        prompts = [{"prompt_token_ids": prompt} for prompt in job["prompts"]]
        chosen = [None if number is None else adapters[number] for number in job["adapters"]]
        outputs = engine.generate(prompts, wanted, lora_request=chosen, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    version = f"vllm {vllm.__version__}, torch {torch.__version__}"
    return answer, {"version": version, "dtype": str(engine.model_config.dtype)}


if __name__ == "__main__":
    serve(open_peer)
