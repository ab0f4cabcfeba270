"""The policy: a Hugging Face causal LM, and the log-probs and entropies of packed responses under it."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.utils import logging as transformers_logging

from r3.errors import ConfigError
from r3.policy import ModelSettings
from r3.policy.attention import is_packed, packed
from r3.policy.layers import CompiledLayers, logits_of, onednn
from r3.policy.layers import statistics as head_statistics
from r3.policy.packing import Trajectory, row_of, sharing_pays
from r3.policy.source import Adapters, adapters_in, check_reachable, continued, merged, on, quiet

log = logging.getLogger(__name__)
transformers_logging.disable_progress_bar()  # two progress bars would overwrite each other

EMBEDDED = Path(__file__).parent.parent / "embedded" / "model"


@dataclass(frozen=True, slots=True)
class TokenStatistics:
    """Log-probs and entropies of every response token of the sequences given, in order. [T]"""

    logprobs_T: Tensor
    entropies_T: Tensor


class Policy:
    """The model being trained, its tokenizer, and where it runs."""

    def __init__(
        self, model: PreTrainedModel, tokenizer: Any, settings: ModelSettings, *, base: PreTrainedModel
    ) -> None:
        self.model: Any = model
        """The module that is optimised and saved: the model, or peft's wrapper around it."""
        self.base = base
        """The transformers model inside, with adapters injected, which runs."""
        self.tokenizer = tokenizer
        self.settings = settings
        self.device = next(base.parameters()).device
        variable_length = self.device.type == "cuda" and base.dtype != torch.float32
        self.shares_prompts: bool | None = True if variable_length else None
        """Whether a prompt that several sequences begin with is forwarded once; None: where that saves enough tokens,
        which is for attention that pads."""
        self._compiled = CompiledLayers(base, "update") if compiles(settings, self.device) else None
        self._reference: PreTrainedModel | None = None
        self.continues = False
        """Whether its adapters existed before this run: the initial policy is then not the model without them."""

    @classmethod
    def load(cls, settings: ModelSettings, *, adapters_from: Path | None = None, base: str | None = None) -> Policy:
        """The model of the settings; with `adapters_from`, the LoRA adapters of a checkpoint instead of new ones.

        Where model.path holds adapters, training goes on with them (model.lora.enabled), or they are merged. `base` is
        where their base model lies, if not where they say.
        """
        path = resolve(settings.path)
        adapters = adapters_in(path, settings)
        if adapters is not None and base is not None:
            adapters = replace(adapters, base=base)
        device = pick_device(settings)
        dtype = pick_dtype(settings, device)
        inner = _whole_model(path, adapters, settings, dtype=dtype)
        if adapters is None and getattr(inner, "_hf_peft_config_loaded", False):  # just fetched from the hub
            adapters = adapters_in(path, settings)
            inner = _whole_model(path, adapters, settings, dtype=dtype)
        inner = inner.to(device)
        tokenizer = _tokenizer_of(path, adapters, settings)
        if adapters is not None and not settings.lora.enabled:
            inner = merged(inner, adapters, settings)
            log.warning("model.path=%s: its %s are merged into the base", settings.path, adapters)
        if settings.gradient_checkpointing:
            enable_checkpointing(inner)
        model: Any = inner
        if settings.lora.enabled and adapters_from is not None:
            model = on(inner, str(adapters_from), settings, is_trainable=True)
        elif settings.lora.enabled and adapters is not None:
            model = continued(inner, adapters, settings)
            log.warning("model.path=%s: going on with its %s", settings.path, adapters)
        elif settings.lora.enabled:
            model = new_adapters(inner, settings)
        policy = cls(model, tokenizer, settings, base=inner)
        policy.continues = adapters is not None and settings.lora.enabled
        policy.check_head()
        return policy

    @property
    def max_context(self) -> int | None:
        """The most tokens of a prompt and its response together, if the model's config says."""
        return getattr(self.base.config.get_text_config(), "max_position_embeddings", None)

    @property
    def stop_tokens(self) -> tuple[int, ...]:
        """Ids that end a response: those of the generation config and of the tokenizer."""
        ends = self.base.generation_config.eos_token_id if self.base.generation_config is not None else None
        given = [] if ends is None else [ends] if isinstance(ends, int) else list(ends)
        end = self.tokenizer.eos_token_id
        return tuple(dict.fromkeys([*given, *([] if end is None else [end])]))

    def statistics(self, sequences: Sequence[Trajectory], *, temperature: float) -> TokenStatistics:
        """Log-probs and entropies of the responses' tokens in one packed forward (with gradient, if enabled).

        With gradient checkpointing, call it and run its backward inside `with packed(policy.base)`.
        """
        if torch.is_grad_enabled() and _is_checkpointing(self.base) and not is_packed(self.base):
            raise RuntimeError(
                "gradient checkpointing runs the forward again: put the backward inside packed() as well"
            )
        row = row_of(sequences, self.device, share=self.shares(sequences))
        with packed(self.base), self.compiled(), onednn(self.base):
            hidden_T = self.base.get_decoder()(
                input_ids=row.ids_T.unsqueeze(0),
                position_ids=row.layout.position_T.unsqueeze(0),
                use_cache=False,
                r3_layout=row.layout,
            ).last_hidden_state.squeeze(0)
            hidden_R = hidden_T.index_select(0, row.before_R)
            vocabulary = self.base.config.get_text_config().vocab_size
            return TokenStatistics(
                *head_statistics(partial(logits_of, self.base), hidden_R, row.targets_R, temperature, vocabulary)
            )

    def shares(self, sequences: Sequence[Trajectory]) -> bool:
        """Whether prompts that several of these begin with are to be forwarded once."""
        return sharing_pays(sequences) if self.shares_prompts is None else self.shares_prompts

    def compiled(self) -> AbstractContextManager[None]:
        """Use compiled layers in the block, if the settings say so. The backward belongs inside, as with `packed`."""
        return self._compiled() if self._compiled is not None else nullcontext()

    @torch.no_grad()
    def check_head(self) -> None:
        """Check that our decoder and head together give the same as the model's forward, which may do more in between.

        On tokens from all over the vocabulary. In half precision the middle one counts: what follows a token that the
        model has hardly met (the reserved ones at the start of a vocabulary) can change by nats with the rounding.
        """
        size = self.base.config.get_text_config().vocab_size
        ids = torch.linspace(0, size - 1, 34, device=self.device).long()
        was_training = self.base.training
        self.base.eval()
        try:
            logs = self.base(input_ids=ids.unsqueeze(0)).logits[0, :-1].float().log_softmax(-1)
            expected = logs.gather(1, ids[1:].unsqueeze(1)).squeeze(1)
            array = ids.cpu().numpy().astype(np.int32)
            ours = self.statistics([Trajectory(array[:1], array[1:])], temperature=1.0).logprobs_T
        finally:
            self.base.train(was_training)
        gaps = (ours - expected).abs()
        exact = self.base.dtype == torch.float32
        gap, most = (float(gaps.max()), 1e-3) if exact else (float(gaps.median()), 0.2)
        if not gap < most:
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
        """Keep a frozen copy of the model as it is now: call it before training and before a checkpoint is loaded."""
        if not self.settings.lora.enabled:
            self._reference = copy.deepcopy(self.base).requires_grad_(False).eval()

    def load_weights(self, folder: Path) -> None:
        """Load the weights that `save` wrote."""
        saved = _from_pretrained(AutoModelForCausalLM, str(folder), self.settings, dtype=self.base.dtype)
        self.base.load_state_dict(saved.state_dict())

    def save(self, folder: Path) -> None:
        """Save the policy in Hugging Face format (the model, or peft's adapters) with its tokenizer."""
        self.model.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)


def resolve(path: str) -> str:
    """The folder of the bundled model for 'embedded'; any other path unchanged."""
    return str(EMBEDDED) if path == "embedded" else path


def pick_device(settings: ModelSettings) -> torch.device:
    if settings.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if settings.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("model.device=cuda, but torch sees no CUDA card: set model.device=cpu or fix the driver")
    return torch.device(settings.device)


def compiles(settings: ModelSettings, device: torch.device) -> bool:
    """Whether layers are compiled: on a card, unless switched off."""
    return settings.compile and device.type == "cuda"


def pick_dtype(settings: ModelSettings, device: torch.device) -> torch.dtype:
    if settings.dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[settings.dtype]


def enable_checkpointing(model: PreTrainedModel) -> None:
    """Recompute activations in the backward pass. transformers 5.23 gave it another name and warns of the old one."""
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})


def _is_checkpointing(model: PreTrainedModel) -> bool:
    """Whether any module recomputes activations; this flag has the same name in all versions of transformers."""
    return any(getattr(module, "gradient_checkpointing", False) for module in model.modules())


def load_tokenizer(path: str, settings: ModelSettings, **options: Any) -> Any:
    return _tokenizer_of(path, adapters_in(path, settings), settings, **options)


def _tokenizer_of(path: str, adapters: Adapters | None, settings: ModelSettings, **options: Any) -> Any:
    """The adapters' tokenizer if they have one, else their base model's."""
    beside = adapters is None or adapters.has_tokenizer
    return _from_pretrained(AutoTokenizer, path if beside or adapters is None else adapters.base, settings, **options)


def load_model_config(path: str, settings: ModelSettings, **options: Any) -> Any:
    adapters = adapters_in(path, settings)
    return _from_pretrained(AutoConfig, path if adapters is None else adapters.base, settings, **options)


def _whole_model(path: str, adapters: Adapters | None, settings: ModelSettings, **options: Any) -> Any:
    """The model at the path, or the base of the adapters that lie there."""
    if adapters is None:
        return _from_pretrained(AutoModelForCausalLM, path, settings, **options)
    plain = settings.model_copy(update={"revision": None})  # a revision is that of the adapters
    try:
        return _from_pretrained(AutoModelForCausalLM, adapters.base, plain, **options)
    except ConfigError as error:
        raise ConfigError(
            f"model.path={settings.path}: its base model {adapters.base} cannot be loaded; put it there, or merge the "
            f"two where it is: r3 models merge {settings.path} --base BASE --to FOLDER"
        ) from error


def _from_pretrained(kind: Any, path: str, settings: ModelSettings, **options: Any) -> Any:
    """transformers' loader; each of its many errors becomes one line that names the setting."""
    if not options.get("local_files_only"):
        check_reachable(path, settings.path, settings.revision)
    try:
        return kind.from_pretrained(
            path, revision=settings.revision, trust_remote_code=settings.trust_remote_code, **options
        )
    except (OSError, ValueError, KeyError, ImportError) as error:
        first = str(error).strip().split("\n")[0]
        if "trust_remote_code" in str(error):
            first = "it comes with code of its own: read that, then set model.trust_remote_code=true"
        raise ConfigError(
            f"model.path={settings.path}: cannot load it ({first}); give a folder with a Hugging Face causal LM, "
            "a hub id that this machine can reach, or 'embedded'"
        ) from error


def new_adapters(base: PreTrainedModel, settings: ModelSettings) -> Any:
    from peft import LoraConfig, get_peft_model

    lora = settings.lora
    config = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,  # type: ignore[arg-type]  # peft scales by any number
        lora_dropout=lora.dropout,
        target_modules=lora.targets,
        task_type="CAUSAL_LM",
    )
    with quiet():
        try:
            return get_peft_model(base, config)
        except ValueError as error:
            first = str(error).split("\n")[0]
            raise ConfigError(
                f"model.lora.targets={lora.targets}: {first[:300]}; 'all-linear' fits every model"
            ) from error
