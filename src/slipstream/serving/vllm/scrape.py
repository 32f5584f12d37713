"""vLLM's Prometheus metrics as ours: which of theirs is which `engine/...` key. Pure."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from types import MappingProxyType

NAMES: Mapping[str, str] = MappingProxyType(
    {
        "engine/tokens/generated": "vllm:generation_tokens_total",
        "engine/tokens/prefilled": "vllm:prompt_tokens_by_source_total{local_compute}",
        "engine/tokens/cached": "vllm:prompt_tokens_by_source_total{local_cache_hit}",
        "engine/requests/running": "vllm:num_requests_running",
        "engine/requests/waiting": "vllm:num_requests_waiting",
        "engine/kv/used_frac": "vllm:kv_cache_usage_perc",
        "engine/preemptions/count": "vllm:num_preemptions_total",
    }
)
_LINE = re.compile(r"^(vllm:[a-z_]+)(?:\{(.*)\})? (\S+)$", re.MULTILINE)
_SOURCE = re.compile(r'source="([a-z_]+)"')
_CACHE = re.compile(r"^vllm:cache_config_info(\{.*\}) ", re.MULTILINE)
_BLOCK, _BLOCKS = re.compile(r'[{,]block_size="(\d+)"'), re.compile(r'[{,]num_gpu_blocks="(\d+)"')


def samples(text: str) -> Mapping[str, float]:
    """Value by name and, where there is one, source; 0 for what is not there. Summed over data-parallel ranks; of shares the largest."""
    found: defaultdict[str, float] = defaultdict(float)
    for name, labels, value in _LINE.findall(text):
        source = _SOURCE.search(labels)
        key = f"{name}{{{source[1]}}}" if source else name
        found[key] = max(found[key], float(value)) if name.endswith("_perc") else found[key] + float(value)
    return found


def kv_cache(text: str) -> tuple[int, int]:
    """Tokens of a block, and of all blocks of all data-parallel ranks; 0 where it does not say."""
    found = [(_BLOCK.search(labels), _BLOCKS.search(labels)) for labels in _CACHE.findall(text)]
    sizes = [(int(size[1]), int(count[1])) for size, count in found if size and count]
    return max((size for size, _ in sizes), default=0), sum(size * count for size, count in sizes)


def values(text: str) -> dict[str, float]:
    """The keys of NAMES."""
    found = samples(text)
    return {key: found[name] for key, name in NAMES.items()}
