"""The policy: a Hugging Face causal LM, and the log-probs and entropies of packed responses under it.

The LM head is applied in chunks of positions, each recomputed in the backward pass, so that the logits of a whole
micro-batch never exist: at 16,384 tokens and a vocabulary of 152k they would take 10 GB in float32, a chunk 270 MB.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.utils import logging as transformers_logging

from r3.config import ConfigError, ModelSettings
from r3.samples import IntArray
from r3.train.packing import is_packed, layout_of, packed

log = logging.getLogger(__name__)
transformers_logging.disable_progress_bar()  # ours is enough: theirs would write over it

HEAD_LOGITS = 2**26
"""Most logits at a time, over all positions of a chunk: 270 MB in float32."""
EMBEDDED = Path(__file__).parent.parent / "embedded" / "model"


@dataclass(frozen=True, slots=True)
class Trajectory:
    """A prompt and its response, as token ids."""

    prompt: IntArray
    response: IntArray

    def __len__(self) -> int:
        return len(self.prompt) + len(self.response)


@dataclass(frozen=True, slots=True)
class TokenStatistics:
    """Of every response token of the sequences given, in order. [T]"""

    logprobs_T: Tensor
    entropies_T: Tensor


class Policy:
    """The model being trained, its tokenizer, and where it runs."""

    def __init__(
        self, model: PreTrainedModel, tokenizer: Any, settings: ModelSettings, *, base: PreTrainedModel
    ) -> None:
        self.model: Any = model
        """What is optimised and saved: the model itself, or peft's wrapper around it."""
        self.base = base
        """The transformers model inside, adapters injected: what runs."""
        self.tokenizer = tokenizer
        self.settings = settings
        self.device = next(base.parameters()).device
        self._reference: PreTrainedModel | None = None

    @classmethod
    def load(cls, settings: ModelSettings, *, adapters_from: Path | None = None) -> Policy:
        """The model of the settings; with `adapters_from`, the LoRA adapters of a checkpoint instead of new ones."""
        path = resolve(settings.path)
        device = pick_device(settings)
        tokenizer = load_tokenizer(path, settings)
        base = _from_pretrained(AutoModelForCausalLM, path, settings, dtype=pick_dtype(settings, device))
        base = base.to(device)
        if settings.gradient_checkpointing:
            base.gradient_checkpointing_enable({"use_reentrant": False})
        model = _with_lora(base, settings, adapters_from) if settings.lora.enabled else base
        policy = cls(model, tokenizer, settings, base=base)
        policy.check_head()
        return policy

    @property
    def max_context(self) -> int | None:
        """Longest prompt and response together, as far as the model's config says."""
        return getattr(self.base.config.get_text_config(), "max_position_embeddings", None)

    @property
    def stop_tokens(self) -> tuple[int, ...]:
        """Ids that end a response: those of the generation config and of the tokenizer."""
        ends = self.base.generation_config.eos_token_id if self.base.generation_config is not None else None
        given = [] if ends is None else [ends] if isinstance(ends, int) else list(ends)
        own = self.tokenizer.eos_token_id
        return tuple(dict.fromkeys([*given, *([] if own is None else [own])]))

    def statistics(self, sequences: Sequence[Trajectory], *, temperature: float) -> TokenStatistics:
        """Log-probs and entropies of the responses' tokens in one packed forward (with gradient, if enabled).

        With gradient checkpointing, call it and run its backward inside `with packed(policy.base)`.
        """
        if torch.is_grad_enabled() and self.base.is_gradient_checkpointing and not is_packed(self.base):
            raise RuntimeError(
                "gradient checkpointing runs the forward again: put the backward inside packed() as well"
            )
        ids = torch.from_numpy(np.concatenate([part for s in sequences for part in (s.prompt, s.response)]))
        layout, position_T = layout_of([len(s) for s in sequences], self.device)
        before, target = _predicting([(len(s.prompt), len(s.response)) for s in sequences])
        with packed(self.base):
            hidden = self.base.get_decoder()(
                input_ids=ids.to(self.device, torch.long).unsqueeze(0),
                position_ids=position_T.unsqueeze(0),
                use_cache=False,
                r3_layout=layout,
            ).last_hidden_state[0]
        targets_T = ids[target].to(self.device, torch.long)
        return self._head(hidden[before.to(self.device)], targets_T, temperature)

    def _head(self, hidden_T: Tensor, targets_T: Tensor, temperature: float) -> TokenStatistics:
        parts = []
        size = head_chunk(self.base.config.get_text_config().vocab_size)
        for at in range(0, len(targets_T), size):
            chunk = hidden_T[at : at + size], targets_T[at : at + size]
            if torch.is_grad_enabled():
                parts.append(checkpoint(self._head_chunk, *chunk, temperature, use_reentrant=False))
            else:
                parts.append(self._head_chunk(*chunk, temperature))
        return TokenStatistics(torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts]))

    def _head_chunk(self, hidden: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        logits = self.base.get_output_embeddings()(hidden).float()
        softcap = getattr(self.base.config.get_text_config(), "final_logit_softcapping", None)
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        logs = torch.log_softmax(logits / temperature, dim=-1)
        entropy = -(logs.detach().exp() * logs.detach()).sum(-1)
        return logs.gather(1, targets.unsqueeze(1)).squeeze(1), entropy

    @torch.no_grad()
    def check_head(self) -> None:
        """Compare our decoder-then-head path with the model's own forward: an architecture may do more in between."""
        ids = torch.arange(3, 9, device=self.device).remainder(self.base.config.get_text_config().vocab_size)
        was_training = self.base.training
        self.base.eval()
        try:
            logs = self.base(input_ids=ids.unsqueeze(0)).logits[0, :-1].float().log_softmax(-1)
            expected = logs.gather(1, ids[1:].unsqueeze(1)).squeeze(1)
            array = ids.cpu().numpy().astype(np.int32)
            ours = self.statistics([Trajectory(array[:1], array[1:])], temperature=1.0).logprobs_T
        finally:
            self.base.train(was_training)
        gap = float((ours - expected).abs().max())
        if not gap < (1e-3 if self.base.dtype == torch.float32 else 0.2):
            raise ConfigError(
                f"model.path={self.settings.path}: {type(self.base).__name__} changes its logits or attention in a way "
                f"the packed update does not know (log-probs differ by {gap:.3g}); use another architecture"
            )

    @contextmanager
    def reference(self) -> Iterator[Policy]:
        """The policy as it was before training, for a KL penalty: adapters off, or a frozen copy."""
        if self.settings.lora.enabled:
            with self.model.disable_adapter():
                yield self
            return
        if self._reference is None:
            raise RuntimeError("keep_reference() must be called before training starts")
        yield Policy(self._reference, self.tokenizer, self.settings, base=self._reference)

    def keep_reference(self) -> None:
        """Hold a frozen copy of the model as it is now, before training or before a checkpoint's weights come in."""
        if not self.settings.lora.enabled:
            self._reference = copy.deepcopy(self.base).requires_grad_(False).eval()

    def load_weights(self, folder: Path) -> None:
        """Take over the weights that `save` wrote."""
        saved = _from_pretrained(AutoModelForCausalLM, str(folder), self.settings, dtype=self.base.dtype)
        self.base.load_state_dict(saved.state_dict())

    def save(self, folder: Path) -> None:
        """The policy in Hugging Face format: the whole model, or peft's adapters; and the tokenizer."""
        self.model.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)


def _predicting(lengths: Sequence[tuple[int, int]]) -> tuple[Tensor, Tensor]:
    """For every response token of a packed row: the place of the token before it, which predicts it, and its own."""
    own, start = [], 0
    for prompt, response in lengths:
        own.append(torch.arange(start + prompt, start + prompt + response))
        start += prompt + response
    target = torch.cat(own)
    return target - 1, target


def head_chunk(vocabulary: int) -> int:
    """Positions whose logits are held at a time."""
    return max(1, HEAD_LOGITS // vocabulary)


def resolve(path: str) -> str:
    """The folder of 'embedded', anything else as it is."""
    return str(EMBEDDED) if path == "embedded" else path


def pick_device(settings: ModelSettings) -> torch.device:
    if settings.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if settings.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("model.device=cuda, but torch sees no CUDA card: set model.device=cpu or fix the driver")
    return torch.device(settings.device)


def pick_dtype(settings: ModelSettings, device: torch.device) -> torch.dtype:
    if settings.dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[settings.dtype]


def load_tokenizer(path: str, settings: ModelSettings, **options: Any) -> Any:
    return _from_pretrained(AutoTokenizer, path, settings, **options)


def load_model_config(path: str, settings: ModelSettings, **options: Any) -> Any:
    return _from_pretrained(AutoConfig, path, settings, **options)


def _from_pretrained(kind: Any, path: str, settings: ModelSettings, **options: Any) -> Any:
    """transformers' loader, its many ways to fail folded into one line that names the setting."""
    try:
        return kind.from_pretrained(path, revision=settings.revision, **options)
    except (OSError, ValueError, KeyError, ImportError) as error:
        first = str(error).strip().split("\n")[0]
        raise ConfigError(
            f"model.path={settings.path}: cannot load it ({first}); give a folder with a Hugging Face causal LM, "
            "a hub id that this machine can reach, or 'embedded'"
        ) from error


def _with_lora(base: PreTrainedModel, settings: ModelSettings, adapters_from: Path | None) -> Any:
    from peft import LoraConfig, PeftModel, get_peft_model

    if adapters_from is not None:
        return PeftModel.from_pretrained(base, str(adapters_from), is_trainable=True)
    lora = settings.lora
    return get_peft_model(
        base,
        LoraConfig(
            r=lora.rank,
            lora_alpha=lora.alpha,  # type: ignore[arg-type]  # peft scales by any number
            lora_dropout=lora.dropout,
            target_modules=lora.targets,
            task_type="CAUSAL_LM",
        ),
    )
