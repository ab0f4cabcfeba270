"""R³ as pure functions of samples and tensors: read these files next to the paper (arXiv 2601.19620).

| the paper | the file |
|---|---|
| Eq. 1 (GRPO's advantage), Eq. 3 (the mixed group's) | `advantage` |
| cross-context replay, CCR | `replay` |
| in-context self-reflection, ISR | `reflection` |
| structural entropy ranking reward, SERR | `ranking` |
| the clipped surrogate, importance weights, KL | `objective` |
| Algorithm 1, from a batch's rollouts to weighted samples | `step`; what it hands on: `mixed` |

Nothing here knows a model, a file, a device or a config file. Only `objective` imports torch.
"""
