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
    """The earlier run's buffer, to be read, after it was found to be of the same problems and the same vocabulary."""
    run = RunFiles(path.replace("{seed}", str(seed)))
    told = f"buffer.successes_from={run.path}"
    try:
        theirs = run.read_info().get("inputs", {}).get("vocabulary")
    except RunError as error:
        raise ConfigError(f"buffer.successes_from: {error}") from error
    if theirs is None:
        raise ConfigError(f"{told}: written by an earlier version, which did not note its vocabulary; run it again")
    if theirs != vocabulary:
        raise ConfigError(
            f"{told}: its tokenizer has another vocabulary, so that its answers would read as other texts: name a run "
            "of a model with this tokenizer"
        )
    buffer = SampleBuffer.open_reader(run.buffer_path)
    tried = buffer.success_rate([query.id for query in queries], context="plain")
    solved = sum(rate > 0 for rate in tried.values())
    if not solved:
        buffer.close()
        raise ConfigError(
            f"{told}: it solved none of this run's {len(queries)} training problems ({len(tried)} were tried there): "
            "name a run on the same task (name, split, size, seed)"
        )
    log.warning("%s: successes of %d of the %d training problems are there to replay", told, solved, len(queries))
    return buffer


def digest_of_vocabulary(tokenizer: Any) -> str:
    """Of what token ids stand for, whatever a template makes of prompts."""
    digest = hashlib.blake2b(digest_size=16)
    digest.update(json.dumps(sorted(tokenizer.get_vocab().items())).encode())
    digest.update(json.dumps([tokenizer.eos_token_id, sorted(tokenizer.all_special_ids)]).encode())
    return digest.hexdigest()
