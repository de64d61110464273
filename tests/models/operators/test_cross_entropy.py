"""The loss in chunks: value and gradients against torch's cross entropy."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from models.operators.cross_entropy import cross_entropy_sum

TOKENS, SIZE, VOCAB = 50, 16, 37


def example(dtype: torch.dtype = torch.float64):
    hidden = torch.randn(5, 10, SIZE, dtype=dtype, requires_grad=True)
    weight = torch.randn(VOCAB, SIZE, dtype=dtype, requires_grad=True)
    labels = torch.randint(0, VOCAB, (5, 10))
    labels[0, :3] = -100
    loss_weight = torch.rand(5, 10)
    loss_weight[1] = 0.0
    return hidden, weight, labels, loss_weight


def reference(hidden, weight, labels, loss_weight):
    nll = F.cross_entropy((hidden @ weight.t()).flatten(0, 1), labels.flatten(), reduction="none", ignore_index=-100)
    return (nll * loss_weight.flatten()).sum()


@pytest.mark.parametrize("chunk", [1, 7, 50, 64, None])
def test_value_and_gradients(chunk):
    hidden, weight, labels, loss_weight = example()
    loss_weight = loss_weight.double()
    expected = reference(hidden, weight, labels, loss_weight)
    actual = cross_entropy_sum(hidden, weight, labels, loss_weight, chunk=chunk)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=0)
    wanted = torch.autograd.grad(3 * expected, [hidden, weight])
    torch.testing.assert_close(torch.autograd.grad(3 * actual, [hidden, weight]), wanted, rtol=0, atol=1e-12)


def test_gradient_of_one_input_only():
    hidden, weight, labels, loss_weight = example()
    expected = torch.autograd.grad(reference(hidden, weight, labels, loss_weight.double()), hidden)
    actual = torch.autograd.grad(cross_entropy_sum(hidden, weight.detach(), labels, loss_weight), hidden)
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("chunk", [7, None])
def test_gradient_of_a_loss_weight_is_the_nll_of_its_token(chunk):
    hidden, weight, labels, loss_weight = example()
    loss_weight = loss_weight.double().requires_grad_()
    expected = torch.autograd.grad(reference(hidden, weight, labels, loss_weight), loss_weight)[0]
    actual = torch.autograd.grad(3 * cross_entropy_sum(hidden, weight, labels, loss_weight, chunk=chunk), loss_weight)[
        0
    ]
    torch.testing.assert_close(actual, 3 * expected.masked_fill(loss_weight == 0, 0.0), rtol=1e-12, atol=0)


def test_bias_correct_predictions_and_few_labels():
    """Compare all options at once with torch on all logits, the gradient of loss_weight too."""
    hidden, weight, labels, loss_weight = example()
    loss_weight = loss_weight.double().requires_grad_()
    bias = torch.randn(VOCAB, dtype=torch.float64, requires_grad=True)
    logits = (hidden @ weight.t() + bias).flatten(0, 1)
    labels[2:] = logits.argmax(-1).unflatten(0, labels.shape)[2:]
    labels[3] = (labels[3] + 1) % VOCAB
    nll = F.cross_entropy(logits, labels.flatten(), reduction="none", ignore_index=-100)
    expected = (nll * loss_weight.flatten()).sum()
    hits = ((logits.argmax(-1) == labels.flatten()) * loss_weight.flatten()).sum().item()
    leaves = [hidden, weight, bias, loss_weight]
    wanted = torch.autograd.grad(3 * expected, leaves)
    wanted = [*wanted[:3], wanted[3].masked_fill(loss_weight == 0, 0.0)]
    for chunk in (7, 64):
        for few in (False, True):
            num_correct = torch.zeros((), dtype=torch.float64)
            options = {"bias": bias, "num_correct": num_correct, "few_labels": few, "chunk": chunk}
            actual = cross_entropy_sum(hidden, weight, labels, loss_weight, **options)
            torch.testing.assert_close(actual, expected, rtol=1e-12, atol=0)
            assert num_correct.item() == pytest.approx(hits, rel=1e-12)
            torch.testing.assert_close(torch.autograd.grad(3 * actual, leaves), tuple(wanted), rtol=0, atol=1e-12)
    assert hits > 0


def test_first_of_equal_logits_is_the_prediction():
    hidden, weight = torch.ones(2, 4), torch.zeros(5, 4)
    weight[2:4] = 1.0
    num_correct = torch.zeros(())
    cross_entropy_sum(hidden, weight, torch.tensor([2, 3]), num_correct=num_correct)
    assert num_correct.item() == 1.0


def test_correct_predictions_of_a_split_vocabulary():
    """Two parts in two threads; ties over their border count once, for the first."""
    from tests.models.rank_threads import Meeting, Threads, over_ranks

    _, _, labels, loss_weight = example()
    loss_weight = loss_weight.double()
    # Matmuls of small integers are exact in any order of additions, so a tie stays a tie.
    hidden = torch.randint(-3, 4, (5, 10, SIZE)).double()
    weight = torch.randint(-3, 4, (36, SIZE)).double()
    weight[18] = weight[17]
    labels = labels.clamp_max(35)
    labels[2] = torch.where(torch.arange(10) % 2 == 0, 17, 18)
    # The first token of a part wins where the label is one of the other part.
    hidden[4] = 10 * weight[0]
    labels[4] = 30
    bias = torch.randint(-3, 4, (36,)).double()
    bias[18] = bias[17] = 40.0
    logits = hidden @ weight.t() + bias
    assert (logits[2].argmax(-1) == 17).any()
    expected = ((logits.argmax(-1) == labels) * loss_weight).sum().item()
    meeting = Meeting(2)

    def work(index):
        num_correct = torch.zeros((), dtype=torch.float64)
        part = slice(18 * index, 18 * index + 18)
        options = {
            "bias": bias[part],
            "num_correct": num_correct,
            "few_labels": True,
            "vocabulary": Threads(index, 2, meeting),
        }
        loss = cross_entropy_sum(hidden, weight[part], labels, loss_weight, **options)
        return torch.stack([loss, num_correct])

    whole = cross_entropy_sum(hidden, weight, labels, loss_weight, bias=bias).item()
    for loss, num_correct in over_ranks(2, work):
        assert loss.item() == pytest.approx(whole, rel=1e-12)
        assert num_correct.item() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(("dtype", "rows"), [(torch.float64, 18), (torch.float32, 16)])
def test_gradients_of_a_split_vocabulary(dtype, rows):
    """Test PyTorch's operators and parts that the C++ kernels support, with logits of one part far above the other's."""
    from tests.models.rank_threads import Meeting, Threads, over_ranks

    hidden, weight, labels, loss_weight = example(dtype)
    bias = torch.randn(2 * rows, dtype=dtype) + 3 * (torch.arange(2 * rows) < rows)
    inputs = [hidden, weight[: 2 * rows].detach().requires_grad_(), bias.requires_grad_()]
    labels = labels.clamp_max(2 * rows - 1)
    whole = cross_entropy_sum(*inputs[:2], labels, loss_weight, bias=inputs[2])
    of_hidden, *of_parts = torch.autograd.grad(whole, inputs)
    meeting = Meeting(2)

    def work(index):
        part = slice(rows * index, rows * index + rows)
        own = [hidden.detach().clone().requires_grad_(), *(x.detach()[part].requires_grad_() for x in inputs[1:])]
        vocabulary = Threads(index, 2, meeting)
        loss = cross_entropy_sum(*own[:2], labels, loss_weight, bias=own[2], chunk=7, vocabulary=vocabulary)
        return torch.autograd.grad(loss, own)

    (first, *one), (second, *other) = over_ranks(2, work)
    tolerance = {"rtol": 0, "atol": 1e-12 if dtype == torch.float64 else 1e-5}
    torch.testing.assert_close(first + second, of_hidden, **tolerance)
    for parts, expected in zip(zip(one, other, strict=True), of_parts, strict=True):
        torch.testing.assert_close(torch.cat(parts), expected, **tolerance)


def test_without_weights_every_label_counts_once():
    hidden, weight, labels, _ = example()
    expected = reference(hidden, weight, labels, torch.ones(5, 10))
    torch.testing.assert_close(cross_entropy_sum(hidden, weight, labels), expected)


@pytest.mark.parametrize("nothing", ["weights", "labels", "tokens"])
def test_loss_without_labels_is_zero(nothing):
    hidden, weight, labels, loss_weight = example()
    if nothing == "weights":
        loss_weight = torch.zeros_like(loss_weight)
    elif nothing == "labels":
        labels = torch.full_like(labels, -100)
    else:
        hidden, labels, loss_weight = hidden[:0], labels[:0], loss_weight[:0]
    loss = cross_entropy_sum(hidden, weight, labels, loss_weight)
    assert loss.item() == 0.0
    for gradient in torch.autograd.grad(loss, [hidden, weight]):
        assert torch.equal(gradient, torch.zeros_like(gradient))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.uint8])
def test_labels_of_every_integer_type(dtype):
    """Test a vocabulary that the C++ kernels support and one that they do not, with -100 where the type has it."""
    for vocab in (48, VOCAB):
        hidden, weight = torch.randn(20, 32), torch.randn(vocab, 32)
        labels = torch.randint(0, vocab, (20,))
        if dtype != torch.uint8:
            labels[::3] = -100
        expected = cross_entropy_sum(hidden, weight, labels)
        for narrow in (labels.to(dtype), torch.stack([labels, labels], 1).to(dtype)[:, 0]):
            assert cross_entropy_sum(hidden, weight, narrow) == expected


@pytest.mark.parametrize("vocab", [48, VOCAB])
@pytest.mark.parametrize("few_labels", [False, True])
def test_labels_outside_the_vocabulary_are_refused(vocab, few_labels):
    hidden, weight = torch.randn(3, 32), torch.randn(vocab, 32)
    for label in (vocab, vocab + 7, -1, -99):
        words = rf"label {label}: allowed are 0 to {vocab - 1}, .*, and -100 for no label"
        for loss_weight in (None, torch.tensor([1.0, 0.0, 1.0])):
            with pytest.raises(ValueError, match=words):
                cross_entropy_sum(
                    hidden, weight, torch.tensor([-100, label, vocab - 1]), loss_weight, few_labels=few_labels
                )


def test_labels_of_wrong_shape_are_refused():
    for labels in (torch.tensor([3]), torch.tensor(3), torch.tensor([[3], [3]])):
        with pytest.raises(ValueError, match="one per row of hidden"):
            cross_entropy_sum(torch.randn(2, 8), torch.randn(16, 8), labels)


def test_weights_of_wrong_shape_are_refused():
    hidden, weight, labels = torch.ones(2, 3, 4), torch.ones(5, 4), torch.zeros(2, 3, dtype=torch.long)
    with pytest.raises(ValueError, match=r"loss_weight \[3, 2\]: expected \[2, 3\]"):
        cross_entropy_sum(hidden, weight, labels, torch.ones(3, 2))


def test_labels_outside_a_split_vocabulary_are_refused():
    from tests.models.rank_threads import Meeting, Threads, over_ranks

    hidden, weight, meeting = torch.randn(2, 8), torch.randn(2, 16, 8), Meeting(2)

    def work(index, label):
        labels = torch.tensor([31, label])
        return cross_entropy_sum(hidden, weight[index], labels, vocabulary=Threads(index, 2, meeting))

    whole = cross_entropy_sum(hidden, weight.flatten(0, 1), torch.tensor([31, -100]))
    torch.testing.assert_close(over_ranks(2, lambda index: work(index, -100), meeting), [whole, whole])
    for label in (32, -1):
        with pytest.raises(ValueError, match=f"label {label}: allowed are 0 to 31"):
            over_ranks(2, lambda index, label=label: work(index, label))


def test_token_of_weight_zero_may_be_nan():
    hidden, weight, labels, loss_weight = example()
    with_nan = hidden.detach().clone()
    with_nan[1] = torch.nan
    with_nan.requires_grad_()
    loss = cross_entropy_sum(with_nan, weight, labels, loss_weight)
    torch.testing.assert_close(loss, cross_entropy_sum(hidden, weight, labels, loss_weight))
    gradient, _ = torch.autograd.grad(loss, [with_nan, weight])
    assert torch.equal(gradient[1], torch.zeros_like(gradient[1]))


def test_large_logits_stay_finite():
    hidden, weight, labels, loss_weight = example()
    expected = reference(hidden * 1e3, weight, labels, loss_weight.double())
    actual = cross_entropy_sum(hidden.float() * 1e3, weight.float(), labels, loss_weight)
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits_are_summed_in_float32(dtype):
    """Weights of one over a batch of tokens and a loss scale: the gradients neither vanish nor overflow."""
    hidden, weight, labels, loss_weight = example(torch.float32)
    scale = 65536.0
    loss_weight = loss_weight / 2e6
    bias = torch.zeros(VOCAB, requires_grad=True)
    nll = F.cross_entropy(
        (hidden @ weight.t() + bias).flatten(0, 1), labels.flatten(), reduction="none", ignore_index=-100
    )
    expected = (nll * loss_weight.flatten()).sum()
    wanted = torch.autograd.grad(scale * expected, [hidden, weight, bias])
    narrow = [x.detach().to(dtype).requires_grad_() for x in (hidden, weight, bias)]
    actual = cross_entropy_sum(*narrow[:2], labels, loss_weight, bias=narrow[2])
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual, expected, rtol=5e-3, atol=0)
    for a, e in zip(torch.autograd.grad(scale * actual, narrow), wanted, strict=True):
        assert a.dtype == dtype
        assert ((a.float() - e).norm() / e.norm()).item() < 2e-2
