"""The image classifier: patches, orders, directions, loss; every refused configuration."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from megatron_lite.optim.param_groups import parameter_kind
from models.config import ModelConfig
from models.image_classifier import (
    ClassificationHead,
    ImageBlock,
    PatchEmbedding,
    add_statistics,
    classification_loss,
    resized_positions,
)
from models.language_model import LanguageModel

LION = {"lion": {"variant": "s", "causal": False}}
BASE = {"vocab_size": 7, "num_layers": 2, "hidden_size": 16, "num_heads": 2, "image_size": 12, "intermediate_size": 32}


def config(**changes) -> ModelConfig:
    return ModelConfig(**{**BASE, "mixers": ("lion",), "mixer_options": LION, **changes})


def causal(**changes) -> ModelConfig:
    return config(mixer_options={"lion": {"variant": "s", "causal": True}}, **changes)


def test_patch_embedding_is_a_convolution_with_the_patch_as_stride():
    embedding = PatchEmbedding(config(pooling="class_token", positions="learned"))
    images = torch.randn(2, 3, 12, 12)
    convolved = F.conv2d(images, embedding.projection.weight.view(16, 3, 4, 4), embedding.projection.bias, stride=4)
    expected = convolved.flatten(2).transpose(1, 2) + embedding.positions[:9]
    tokens = embedding(images)
    torch.testing.assert_close(tokens[:, :9], expected)
    torch.testing.assert_close(tokens[:, 9], (embedding.class_token + embedding.positions[9]).expand(2, -1))


@pytest.mark.parametrize("pooling", ["mean", "class_token"])
def test_orders_and_directions_run_the_mixer_on_permuted_patches(pooling):
    tokens = 10 if pooling == "class_token" else 9
    x = torch.randn(2, tokens, 16)
    rest = list(range(9, tokens))
    columns = [0, 3, 6, 1, 4, 7, 2, 5, 8]
    rows = list(range(9))
    expected_orders = {
        ("rows", "forward", 1): [rows],
        ("columns", "backward", 0): [columns[::-1]],
        ("rows", "alternating", 1): [rows[::-1]],
        ("both", "both", 0): [rows, rows[::-1], columns, columns[::-1]],
    }
    for (order, direction, layer), orders in expected_orders.items():
        block = ImageBlock(causal(patch_order=order, direction=direction, pooling=pooling), layer)
        outputs = []
        for one in orders:
            permutation = torch.tensor([*one, *rest])
            outputs.append(block.mixer(x[:, permutation])[:, permutation.argsort()])
        torch.testing.assert_close(block.run_mixer(x), torch.stack(outputs).mean(0))


def test_natural_order_of_a_bidirectional_mixer_averages_rows_and_columns_once():
    block = ImageBlock(config(patch_order="both"), 0)
    assert block.scans == [(False, False), (True, False)]


def test_transposed_images_have_the_same_scores_in_natural_order():
    model = LanguageModel(config(patch_order="both"), seed=3).eval()
    weight = model.embedding.projection.weight.data
    weight.copy_((weight.view(16, 3, 4, 4) + weight.view(16, 3, 4, 4).transpose(2, 3)).flatten(1) / 2)
    images = torch.randn(3, 3, 12, 12)
    torch.testing.assert_close(model(images), model(images.transpose(2, 3)))
    rows = LanguageModel(config(), seed=3).eval()
    rows.load_state_dict(model.state_dict())
    assert not torch.allclose(rows(images), rows(images.transpose(2, 3)), atol=1e-5)


def test_class_token_of_a_causal_model_reads_every_patch():
    for direction in ("forward", "backward", "alternating"):
        model = LanguageModel(causal(direction=direction, pooling="class_token"), seed=1).double()
        images = torch.randn(1, 3, 12, 12, dtype=torch.float64, requires_grad=True)
        (gradient,) = torch.autograd.grad(model(images)[0, 2], images)
        assert (gradient.unflatten(3, (3, 4)).unflatten(2, (3, 4)).abs().amax((0, 1, 3, 5)) > 0).all()


def test_loss_with_smoothed_labels_equals_that_of_pytorch():
    logits, labels = torch.randn(6, 7), torch.randint(7, (6,))
    targets = F.one_hot(labels, 7) * 0.9 + 0.1 / 7
    expected = F.cross_entropy(logits, labels, label_smoothing=0.1, reduction="none")
    torch.testing.assert_close(classification_loss(logits, labels, targets), expected)


def test_soft_distillation_is_a_scaled_divergence():
    logits, teacher, labels = torch.randn(6, 7), torch.randn(6, 7), torch.randint(7, (6,))
    targets = 0.75 * F.one_hot(labels, 7)
    weight = 0.25 * 3.0**2
    given = classification_loss(logits, labels, targets, weight * (teacher / 3).softmax(-1), torch.full((6,), 3.0))
    divergence = F.kl_div((logits / 3).log_softmax(-1), (teacher / 3).softmax(-1), reduction="none").sum(-1)
    torch.testing.assert_close(given, 0.75 * F.cross_entropy(logits, labels, reduction="none") + weight * divergence)


def test_teacher_without_a_temperature_has_temperature_one():
    logits, teacher, labels = torch.randn(6, 7), torch.randn(6, 7).softmax(-1), torch.randint(7, (6,))
    without = classification_loss(logits, labels, teacher=teacher)
    torch.testing.assert_close(without, classification_loss(logits, labels, None, teacher, torch.ones(6)))


def test_head_counts_top1_top5_and_confusions():
    ascending = [0.0, 1, 2, 3, 4, 5, 6]
    logits = torch.tensor([[5.0, 4, 3, 2, 1, 0, -1], ascending, ascending, [9.0, 0, 0, 0, 0, 0, 1]])
    # Correct; sixth; fifth; correct without weight.
    labels, weight = torch.tensor([0, 1, 2, 0]), torch.tensor([1.0, 1.0, 2.0, 0.0])
    correct, top5, confusion = torch.zeros(()), torch.zeros(()), torch.zeros(7, 7)
    add_statistics(logits, labels, weight, correct, top5, confusion)
    assert (correct.item(), top5.item()) == (1.0, 3.0)
    assert [(*place, confusion[*place].item()) for place in confusion.nonzero().tolist()] == [
        (0, 0, 1.0),
        (1, 6, 1.0),
        (2, 6, 2.0),
    ]


def test_head_with_labels_adds_all_statistics_of_its_logits():
    head, hidden, labels = ClassificationHead(config()), torch.randn(5, 9, 16), torch.randint(7, (5,))
    added = {"num_correct": torch.zeros(()), "num_top5": torch.zeros(()), "confusion": torch.zeros(7, 7)}
    expected = {name: count.clone() for name, count in added.items()}
    head(hidden, labels=labels, **added)
    add_statistics(head(hidden), labels, torch.ones(5), **expected)
    assert all(torch.equal(added[name], expected[name]) for name in expected)
    assert added["confusion"].sum() == 5


@pytest.mark.parametrize("label", [-100, -1, 7])
def test_label_that_is_no_class_is_refused(label):
    with pytest.raises(ValueError, match=f"label {label}: allowed are 0 to 6, the classes"):
        ClassificationHead(config())(torch.randn(2, 9, 16), labels=torch.tensor([3, label]))


def test_state_is_refused():
    with pytest.raises(ValueError, match="an image classifier has no state: call it without return_state"):
        ImageBlock(causal(), 0)(torch.randn(1, 9, 16), return_state=True)


def test_flops_of_a_block_count_its_scans():
    for shape, scans in (
        (causal(direction="forward"), 1),
        (causal(), 2),
        (causal(patch_order="both"), 4),
        (config(), 1),
    ):
        block = ImageBlock(shape, 0)
        assert block.flops_per_token(9) == scans * block.mixer.flops_per_token(9) + block.mlp.flops_per_token(9)


def test_flops_and_kinds_of_embedding_and_head():
    for pooling, tokens, per_token in (("mean", 9, 25), ("class_token", 10, 23)):
        shape = config(pooling=pooling, positions="learned")
        embedding, head = PatchEmbedding(shape), ClassificationHead(shape)
        assert embedding.flops_per_token(tokens) == 2 * 3 * 4**2 * 16
        # 2 * 7 * 16 FLOPs per image, rounded up per token.
        assert head.flops_per_token(tokens) == per_token
    kinds = {name: parameter_kind(embedding, name) for name, _ in embedding.named_parameters()}
    assert kinds == {
        "class_token": "embedding",
        "positions": "embedding",
        "projection.weight": "weight",
        "projection.bias": "bias",
    }


def test_head_reads_the_pooled_norm():
    for pooling in ("mean", "class_token"):
        head = ClassificationHead(config(pooling=pooling))
        hidden = torch.randn(2, 10, 16)
        normed = head.norm(hidden)
        pooled = normed.mean(1) if pooling == "mean" else normed[:, -1]
        torch.testing.assert_close(head(hidden), pooled @ head.weight.T + head.bias)
    with pytest.raises(ValueError, match=r"loss_weight \[2, 1\]: expected \[2\]"):
        head(hidden, labels=torch.tensor([0, 1]), loss_weight=torch.ones(2, 1))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"image_size": 30},
            "model.image_size = 30 is no multiple of model.patch_size = 4; nearest multiples: 28 or 32",
        ),
        ({"patch_size": 0}, "model.patch_size = 0: must be at least 1"),
        ({"direction": "forward"}, "model.direction = forward: lion reads both directions"),
        ({"mixers": ("lion", "metala")}, "choose mixers of one kind"),
        ({"mixers": ("rwkv7",), "mixer_options": {}}, "'rwkv7' has a value residual"),
        ({"positions": "learned", "max_positions": 5}, "model.max_positions = 5: an image has 9 tokens"),
        ({"head": "mlm"}, "model.head = mlm is for language models"),
        (
            {"image_size": None, "patch_order": "both"},
            "model.patch_order = both is for image classifiers: leave it out, or set model.image_size",
        ),
    ],
)
def test_configurations_that_cannot_run_are_refused_with_their_key(changes, message):
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        config(**changes)


def test_resized_positions_interpolate_the_grid_and_keep_the_class_token():
    row, column = torch.meshgrid(torch.arange(4.0), torch.arange(4.0), indexing="ij")
    grid = torch.stack([row, 10 * column], -1).flatten(0, 1)
    positions = torch.cat([grid, torch.full((1, 2), 7.0)])
    assert torch.equal(resized_positions(positions, 4, 4), positions)
    resized = resized_positions(positions, 4, 8)
    assert resized.shape == (65, 2)
    assert torch.equal(resized[-1], positions[-1])
    by_row, by_column = resized[:64, 0].view(8, 8), resized[:64, 1].view(8, 8)
    assert torch.allclose(by_row, by_row[:, :1])
    assert torch.allclose(10 * by_row.T, by_column)
    # Centres of the new patches lie a quarter of an old patch beside those of the old ones.
    low, high = by_row[3:5, 0].tolist()
    assert low + high == pytest.approx(3)
    assert 1.2 < low < 1.3


def test_images_of_another_size_are_refused():
    with pytest.raises(ValueError, match=r"images \[1, 3, 16, 16\]: this model reads \[batch, 3, 12, 12\]"):
        LanguageModel(config())(torch.zeros(1, 3, 16, 16))
