"""token_logprobs is log_softmax, its gradient is that of log_softmax, and the logits of a whole row never exist."""

import pytest
import torch

from slipstream.errors import StateError
from slipstream.ops import logprobs as module
from slipstream.ops import token_logprobs


def _inputs(tokens: int = 37, dim: int = 8, vocab: int = 19, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    hidden = torch.randn(tokens, dim, dtype=dtype, requires_grad=True)
    weight = torch.randn(vocab, dim, dtype=dtype, requires_grad=True)
    return [hidden, weight, torch.randint(0, vocab, (tokens,)), torch.rand(tokens) + 0.5]


def _naive(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, temperature: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    logprobs = (hidden @ weight.T / temperature[:, None]).log_softmax(-1)
    return logprobs.gather(1, targets[:, None])[:, 0], -(logprobs.exp() * logprobs).sum(-1)


@pytest.mark.parametrize("vocab", [3, 8, 19, 64])
@pytest.mark.parametrize("chunk", [1, 10, 37, 1000])
@pytest.mark.parametrize("native", [True, False])
def test_logprobs_entropy_and_gradients_equal_log_softmax(native, chunk, vocab, monkeypatch):
    if not native:
        monkeypatch.setattr(module, "native_for", lambda *tensors: None)
    inputs = _inputs(vocab=vocab)
    (ours, entropy), (naive, naive_entropy) = token_logprobs(*inputs, chunk), _naive(*inputs)
    torch.testing.assert_close(ours, naive)
    torch.testing.assert_close(entropy, naive_entropy)
    slope = torch.randn_like(ours)
    for a, b in zip(torch.autograd.grad(ours, inputs[:2], slope), torch.autograd.grad(naive, inputs[:2], slope), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_it_passes_gradcheck_in_double_precision():
    hidden, weight, targets, temperature = _inputs(9, 4, 7, torch.float64)
    assert torch.autograd.gradcheck(lambda h, w: token_logprobs(h, w, targets, temperature, 4)[0], (hidden, weight))


def test_probabilities_of_all_targets_sum_to_one_and_a_uniform_head_has_entropy_log_v():
    hidden, weight, _, temperature = (x.detach() for x in _inputs(19))
    rows = [token_logprobs(hidden[i].expand(19, -1), weight, torch.arange(19), temperature[i].expand(19))[0].exp().sum() for i in range(5)]
    torch.testing.assert_close(torch.stack(rows), torch.ones(5))
    _, entropy = token_logprobs(hidden, torch.zeros_like(weight), torch.zeros(19).long(), temperature)
    torch.testing.assert_close(entropy, torch.tensor(19.0).log().expand(19))


def test_logits_of_any_size_give_finite_logprobs_that_agree_with_log_softmax():
    hidden, weight, targets, temperature = _inputs()
    hidden = (hidden.detach() * 300).requires_grad_()
    ours, _ = token_logprobs(hidden, weight, targets, temperature)
    torch.testing.assert_close(ours, _naive(hidden, weight, targets, temperature)[0], rtol=1e-5, atol=1e-3)
    ours.sum().backward()
    assert hidden.grad is not None and hidden.grad.isfinite().all()


def test_a_temperature_of_zero_stands_for_the_untempered_distribution():
    hidden, weight, targets, temperature = _inputs()
    greedy = token_logprobs(hidden, weight, targets, torch.zeros_like(temperature))
    plain = token_logprobs(hidden, weight, targets, torch.ones_like(temperature))
    assert torch.equal(greedy[0], plain[0]) and torch.equal(greedy[1], plain[1])


def test_no_more_than_a_chunk_of_logits_ever_exists_and_untrained_tokens_are_not_recomputed(monkeypatch):
    rows: list[int] = []
    original = module.chunk_logits

    def spy(hidden_CD, weight_VD):
        rows.append(len(hidden_CD))
        return original(hidden_CD, weight_VD)

    monkeypatch.setattr(module, "chunk_logits", spy)
    inputs = _inputs(100)
    logprobs, _ = token_logprobs(*inputs, 16)
    assert rows == [16] * 6 + [4]
    rows.clear()
    logprobs[torch.arange(100) % 4 == 0].sum().backward()
    assert sum(rows) == 25 and max(rows) <= 16
    assert inputs[0].grad is not None
    assert not inputs[0].grad[1::4].any()


def test_the_entropy_is_a_metric_without_gradient_and_unneeded_gradients_are_not_computed():
    hidden, weight, targets, temperature = _inputs()
    logprobs, entropy = token_logprobs(hidden, weight.detach(), targets, temperature)
    assert not entropy.requires_grad
    logprobs.sum().backward()
    assert hidden.grad is not None and weight.grad is None


def test_bf16_hidden_states_give_fp32_logprobs():
    inputs = _inputs()
    exact, _ = token_logprobs(*inputs)
    rough, entropy = token_logprobs(inputs[0].bfloat16(), inputs[1].bfloat16(), *inputs[2:])
    assert rough.dtype is entropy.dtype is torch.float32
    torch.testing.assert_close(rough, exact, rtol=0.1, atol=0.15)
    rough.sum().backward()
    assert inputs[0].grad is not None


def test_bad_input_is_refused():
    hidden, weight, targets, temperature = _inputs()
    with pytest.raises(StateError, match="chunk_tokens must be at least 1"):
        token_logprobs(hidden, weight, targets, temperature, 0)
    with pytest.raises(StateError, match="36 targets"):
        token_logprobs(hidden, weight, targets[1:], temperature)
    with pytest.raises(StateError, match="outside its array"):
        token_logprobs(hidden, weight, targets + 19, temperature)
