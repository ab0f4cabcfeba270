"""The buffer of an earlier run whose successes are replayed (`buffer.successes_from`)."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Sequence
from typing import Any

from r3.buffer import SampleBuffer
from r3.errors import ConfigError, RunError
from r3.run import RunFiles
from r3.samples import Query

log = logging.getLogger(__name__)


def open_earlier(path: str, seed: int, queries: Sequence[Query], vocabulary: str) -> SampleBuffer:
    """The earlier run's buffer, read-only, once it is known to have the same problems and vocabulary."""
    run = RunFiles(path.replace("{seed}", str(seed)))
    setting = f"buffer.successes_from={run.path}"
    try:
        theirs = run.read_info().get("inputs", {}).get("vocabulary")
    except RunError as error:
        raise ConfigError(f"buffer.successes_from: {error}") from error
    if theirs is None:
        raise ConfigError(f"{setting}: written by an earlier version, which did not note its vocabulary; run it again")
    if theirs != vocabulary:
        raise ConfigError(
            f"{setting}: its tokenizer has another vocabulary, so its answers would read as other texts: name a run of "
            "a model with this tokenizer"
        )
    buffer = SampleBuffer.open_reader(run.buffer_path)
    tried = buffer.success_rate([query.id for query in queries], context="plain")
    solved = sum(rate > 0 for rate in tried.values())
    if not solved:
        buffer.close()
        raise ConfigError(
            f"{setting}: it solved none of this run's {len(queries)} training problems ({len(tried)} were tried): "
            "name a run on the same task (name, split, size, seed)"
        )
    log.warning("%s: successes of %d of the %d training problems are there to replay", setting, solved, len(queries))
    return buffer


def digest_of_vocabulary(tokenizer: Any) -> str:
    """A digest of what token ids stand for; the chat template does not count."""
    digest = hashlib.blake2b(digest_size=16)
    digest.update(json.dumps(sorted(tokenizer.get_vocab().items())).encode())
    digest.update(json.dumps([tokenizer.eos_token_id, sorted(tokenizer.all_special_ids)]).encode())
    return digest.hexdigest()
