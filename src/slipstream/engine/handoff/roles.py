"""What an engine process of a run does beside answering requests: a prefill engine hands blocks over, a decode engine asks for them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from slipstream.config.disaggregation import DisaggregationConfig
from slipstream.config.serve import EngineConfig
from slipstream.engine.driver import EngineDriver
from slipstream.engine.engine import EmbeddedEngine
from slipstream.engine.handoff.listener import Form, HandoffListener
from slipstream.engine.handoff.source import HandoffSource
from slipstream.engine.handoff.token import run_token


@contextmanager
def in_role(driver: EngineDriver, config: EngineConfig, run_folder: Path, replica: int) -> Iterator[str]:
    """Play the replica's role while the block runs, in the driver's event loop. Yields where handoffs are given; '': nowhere.

    Raises ConfigError when the port is taken.
    """
    role, split = config.role(replica), config.disaggregation
    if role == "mixed":
        yield ""
        return
    engine = driver.engine
    assert isinstance(engine, EmbeddedEngine)
    form, token = form_of(engine), run_token(run_folder)
    if role == "decode":
        source = decode_role(driver, engine, token, split)
        try:
            yield ""
        finally:
            source.close()
        return
    listener = HandoffListener(driver, form, engine.seq_len, token, split, driver.handoffs)
    index = replica - (config.replicas - split.prefill_replicas)
    address = listener.start(config.host, split.port + index if split.port else 0)
    try:
        yield address
    finally:
        listener.close()


def decode_role(driver: EngineDriver, engine: EmbeddedEngine, token: str, split: DisaggregationConfig) -> HandoffSource:
    """Let the driver's engine ask prefill engines for blocks, until the source is closed, and go easy on prompts of its own."""
    source = HandoffSource(engine.blocks, form_of(engine), token, driver.weights, split, driver.handoffs)
    engine.sources.append(source)
    engine.yield_to_decoding(split.decode_prompt_tokens)
    return source


def form_of(engine: EmbeddedEngine) -> Form:
    blocks, tokens = engine.blocks, engine.config.block_tokens
    return Form(f"{blocks.block_bytes} bytes a block of {tokens} tokens ({blocks.shape.hex()})", blocks.block_bytes, tokens)
