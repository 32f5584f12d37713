"""The whole algorithm, synchronously, in one file: the text to read first, and the oracle that the system is tested against.

    python examples/reference.py            # about a minute on one core: a random MoE learns to answer a digit with its successor

One step: sample a group of answers to each question; reward them; advantage = reward - mean of the group; the DPPO loss on every
sampled token; AdamW. No engine, no packing, no asynchrony: every sequence is run on its own, attention is the formula, sampling runs
the whole sequence again for each token. What stays of the real system is the model (`slipstream.models`) and its two seams:

- router replay: which experts each token used is recorded while sampling and forced while training;
- the loss is a sum over all sampled tokens of the batch divided by their number.

Shapes: T tokens of one sequence, H query heads, G key/value heads, d head features, E experts, K experts per token, L MoE layers.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from slipstream.models.decoder import Decoder
from slipstream.models.load import build_model
from slipstream.models.spec import ModelSpec

# ---- the two seams of the model ------------------------------------------------------------------------------------------------


class Plain:
    """Causal attention by its formula; experts forced where `forced_TLK` says so (-1: unknown), the model's own top-k elsewhere."""

    def __init__(self, forced_TLK: Tensor | None = None) -> None:
        self.forced_TLK = forced_TLK
        self.used_LTK: list[Tensor] = []

    def attend(self, layer: int, q_THd: Tensor, k_TGd: Tensor, v_TGd: Tensor, sight: None = None) -> Tensor:
        repeats = q_THd.shape[1] // k_TGd.shape[1]
        k_THd, v_THd = k_TGd.repeat_interleave(repeats, dim=1), v_TGd.repeat_interleave(repeats, dim=1)
        scores_HTT = torch.einsum("thd,shd->hts", q_THd, k_THd) / q_THd.shape[-1] ** 0.5
        future_TT = torch.ones(scores_HTT.shape[1:], dtype=torch.bool).triu(1)
        return torch.einsum("hts,shd->thd", scores_HTT.masked_fill(future_TT, -torch.inf).softmax(-1), v_THd)

    def route(self, moe_layer: int, scores_TE: Tensor, top_k: int) -> Tensor:
        ids_TK = scores_TE.topk(top_k).indices
        if self.forced_TLK is not None:
            forced_TK = self.forced_TLK[:, moe_layer]
            ids_TK = torch.where(forced_TK >= 0, forced_TK, ids_TK)
        self.used_LTK.append(ids_TK)
        return ids_TK

    def weigh(self, moe_layer: int, logits_TE: Tensor, gates_TK: Tensor) -> Tensor:
        return gates_TK


def next_logprobs(model: Decoder, tokens_T: Tensor, temperature: float, seams: Plain) -> Tensor:
    """log p of every vocabulary entry as the next token, after each token: [T, V]."""
    hidden_TD = model(tokens_T, torch.arange(len(tokens_T)), seams)
    return (model.logits(hidden_TD) / temperature).log_softmax(-1)


# ---- sampling ------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Answer:
    """One sampled sequence: everything that training needs to know about it."""

    tokens_T: Tensor
    prompt_tokens: int
    logprobs_T: Tensor
    """Of the sampled tokens when they were sampled; 0 on the prompt."""
    routing_TLK: Tensor
    """Experts used to process each token; -1 for the last one, which nothing was sampled after."""
    temperature: float
    advantage: float = 0.0


@torch.no_grad()
def sample(model: Decoder, prompt: list[int], max_tokens: int, temperature: float, random: torch.Generator) -> Answer:
    tokens, logprobs = list(prompt), [0.0] * len(prompt)
    seams = Plain()
    for _ in range(max_tokens):
        seams = Plain()
        logprobs_V = next_logprobs(model, torch.tensor(tokens), temperature, seams)[-1]
        token = int(torch.multinomial(logprobs_V.exp(), 1, generator=random))
        tokens.append(token)
        logprobs.append(float(logprobs_V[token]))
        if token in model.spec.eos_ids:
            break
    used_TLK = torch.stack(seams.used_LTK, dim=1)
    routing_TLK = torch.cat([used_TLK, torch.full_like(used_TLK[:1], -1)])
    return Answer(torch.tensor(tokens), len(prompt), torch.tensor(logprobs), routing_TLK, temperature)


# ---- advantage and loss --------------------------------------------------------------------------------------------------------


def group_advantages(rewards: list[float]) -> list[float]:
    """How much better than its group: r - mean(r)."""
    mean = sum(rewards) / len(rewards)
    return [reward - mean for reward in rewards]


def dppo_loss(model: Decoder, answer: Answer, tv_threshold: float, kl_coef: float) -> Tensor:
    """Sum over the sampled tokens of -A · ratio · keep + kl_coef · (log ratio)². arXiv 2602.04879; prime-rl v0.6.0.

    ratio = p now / p when sampled. A token whose probability has already moved by `tv_threshold` the way its advantage pushes is
    not pushed further.
    """
    logprobs_TV = next_logprobs(model, answer.tokens_T, answer.temperature, Plain(answer.routing_TLK))
    targets_T = answer.tokens_T[1:]
    new_T = logprobs_TV[:-1].gather(1, targets_T[:, None])[:, 0][answer.prompt_tokens - 1 :]
    old_T = answer.logprobs_T[answer.prompt_tokens :]
    log_ratio_T = new_T - old_T
    moved_T = (new_T.exp() - old_T.exp()).detach()
    pushed_too_far_T = moved_T > tv_threshold if answer.advantage > 0 else moved_T < -tv_threshold
    gain_T = answer.advantage * log_ratio_T.exp() * ~pushed_too_far_T
    return (kl_coef * log_ratio_T.square() - gain_T).sum()


def batch_loss(model: Decoder, answers: list[Answer], tv_threshold: float = 0.2, kl_coef: float = 1e-3) -> Tensor:
    """The mean over all sampled tokens of the batch, so that a token weighs the same whatever its sequence."""
    num_tokens = sum(len(answer.tokens_T) - answer.prompt_tokens for answer in answers)
    return sum((dppo_loss(model, answer, tv_threshold, kl_coef) for answer in answers), torch.tensor(0.0)) / num_tokens


# ---- optimizer -----------------------------------------------------------------------------------------------------------------


class AdamW:
    """arXiv 1711.05101, after clipping the global gradient norm; weight decay on matrices only."""

    def __init__(self, model: Decoder, lr: float, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0, clip_norm=1.0) -> None:
        self.parameters = list(model.parameters())
        self.lr, self.betas, self.eps, self.weight_decay, self.clip_norm = lr, betas, eps, weight_decay, clip_norm
        self.mean = [torch.zeros_like(p) for p in self.parameters]
        self.square = [torch.zeros_like(p) for p in self.parameters]
        self.steps = 0

    @torch.no_grad()
    def step(self, gradients: list[Tensor]) -> None:
        self.steps += 1
        norm = torch.stack([g.square().sum() for g in gradients]).sum().sqrt()
        scale = min(1.0, self.clip_norm / (float(norm) + 1e-6))
        beta1, beta2 = self.betas
        for p, gradient, mean, square in zip(self.parameters, gradients, self.mean, self.square, strict=True):
            g = gradient * scale
            mean.copy_(beta1 * mean + (1 - beta1) * g)
            square.copy_(beta2 * square + (1 - beta2) * g * g)
            unbiased, spread = mean / (1 - beta1**self.steps), (square / (1 - beta2**self.steps)).sqrt()
            if p.ndim >= 2:
                p.mul_(1 - self.lr * self.weight_decay)
            p.sub_(self.lr * unbiased / (spread + self.eps))


def train_step(model: Decoder, optimizer: AdamW, answers: list[Answer]) -> tuple[float, list[Tensor]]:
    """One optimizer step. Returns the loss and the gradients (before clipping)."""
    loss = batch_loss(model, answers)
    gradients = list(torch.autograd.grad(loss, optimizer.parameters))
    optimizer.step(gradients)
    return float(loss.detach()), gradients


# ---- a task, and the loop ------------------------------------------------------------------------------------------------------

ASK, EOS, VOCAB = 10, 11, 12
"""Tokens 0 to 9 are digits."""
TINY_MOE = ModelSpec(
    family="qwen3_moe",
    vocab_size=VOCAB,
    hidden=32,
    intermediate=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    max_positions=64,
    rope_theta=10_000.0,
    rms_eps=1e-6,
    tie_embeddings=False,
    qk_norm=True,
    moe_layers=(0, 1),
    num_experts=8,
    top_k=2,
    expert_intermediate=32,
    norm_top_k=True,
    eos_ids=(EOS,),
)


def reward(question: int, answer: Answer) -> float:
    """Share right of 'the successor, then the end', of two tokens."""
    said = answer.tokens_T[answer.prompt_tokens :].tolist()
    right = [(question + 1) % 10, EOS]
    return sum(a == b for a, b in zip(said, right, strict=False)) / len(right)


def collect(model: Decoder, questions: list[int], group_size: int, random: torch.Generator) -> tuple[list[Answer], float]:
    """A group of answers to each question, with advantages; and the mean reward."""
    answers: list[Answer] = []
    total = 0.0
    for question in questions:
        group = [sample(model, [question, ASK], 4, 1.0, random) for _ in range(group_size)]
        rewards = [reward(question, answer) for answer in group]
        total += sum(rewards)
        answers += [replace(answer, advantage=a) for answer, a in zip(group, group_advantages(rewards), strict=True)]
    return answers, total / len(answers)


def main(steps: int = 60, seed: int = 0) -> float:
    """Train; print as it goes; return the mean reward of the last step."""
    random = torch.Generator().manual_seed(seed)
    model = build_model(TINY_MOE, seed=seed)
    optimizer = AdamW(model, lr=1e-2)
    mean_reward = 0.0
    for step in range(1, steps + 1):
        questions = torch.randint(0, 10, (8,), generator=random).tolist()
        answers, mean_reward = collect(model, questions, group_size=8, random=random)
        loss, _ = train_step(model, optimizer, answers)
        if step % 10 == 0 or step == 1:
            print(f"step {step:3d}  reward {mean_reward:.3f}  loss {loss:+.4f}")
    return mean_reward


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    main(arguments.steps, arguments.seed)
