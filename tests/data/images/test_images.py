"""Labelled images: reading, augmentation, samples, and files that cannot be used."""

from __future__ import annotations

import dataclasses
import errno
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from datasets.exceptions import DatasetGenerationError
from PIL import Image, ImageOps

from data.checksum import DamagedDataError
from data.images.augmentation import Augmentation, _crop_box, erase
from data.images.dataset import ImageDataset
from data.images.reading import LabelledImages, find_images
from data.loader import batches
from tests.made_images import CLASSES, encoded, picture, write_folder, write_parquet

ALL = Augmentation(
    8, crop="pad", flip=0.5, randaugment_layers=2, randaugment_magnitude=15, random_erasing=0.5, padding=2
)


def opened(path: Path | list[str], num_classes: int = 3, **options) -> LabelledImages:
    first = Path(path if isinstance(path, Path) else path[0])
    given = str(path) if isinstance(path, Path) else path
    cache = first.parent / "cache"
    return LabelledImages(
        find_images(given, "data.images.train"), num_classes=num_classes, cache_directory=cache, **options
    )


@pytest.fixture(scope="module")
def images(tmp_path_factory) -> LabelledImages:
    folder = tmp_path_factory.mktemp("images")
    first, second = (
        write_parquet(folder / f"{name}.parquet", labels) for name, labels in (("a", [0, 1, 2]), ("b", [2, 1]))
    )
    return opened([str(first), str(second)])


def test_parquet_files_are_read_in_order(images):
    assert images.class_names == CLASSES
    assert images.labels.tolist() == [0, 1, 2, 2, 1]
    assert np.array_equal(images.image(3), picture(2, 0))
    assert images.files.place_of(4) == (images.files.parquet[1], 1)


def test_folder_of_classes_has_the_same_images(tmp_path):
    images = opened(write_folder(tmp_path / "train", 2))
    assert images.class_names == tuple(sorted(CLASSES))
    by_name = [images.class_names[label] for label in images.labels]
    assert sorted(by_name) == sorted([*CLASSES, *CLASSES])
    first = by_name.index("green")
    assert np.array_equal(images.image(first), picture(1, 0))


def test_path_that_exists_is_no_pattern(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    run = tmp_path / "run[1]"
    write_folder(run / "classes", 1)
    write_parquet(run / "a.parquet", [2, 0])
    assert len(opened(run / "classes")) == 3
    assert opened(run / "a.parquet").labels.tolist() == [2, 0]
    assert opened(["~/run[1]/a.parquet"]).labels.tolist() == [2, 0]
    assert opened([f"{tmp_path}/run[[]1]/*.parquet"]).labels.tolist() == [2, 0]


def test_class_without_images_keeps_the_numbers_of_the_others(tmp_path):
    folder = write_folder(tmp_path / "validation", 1)
    (folder / "green" / "0.png").unlink()
    (folder / ".hidden").mkdir()
    images = opened(folder)
    assert images.class_names == ("blue", "green", "red")
    assert images.labels.tolist() == [0, 2]


def test_samples_depend_on_seed_and_number_alone(images):
    dataset = ImageDataset(images, ALL, num_samples=15, seed=3, label_smoothing=0.1)
    again = ImageDataset(images, ALL, num_samples=40, seed=3, label_smoothing=0.1)
    for number in (12, 0, 7):  # in another order, of a longer run
        for key, value in dataset[number].items():
            assert torch.equal(value, again[number][key])
    epochs = [[int(dataset[5 * epoch + place]["labels"]) for place in range(5)] for epoch in range(3)]
    assert all(sorted(labels) == sorted(images.labels) for labels in epochs)
    assert len({tuple(labels) for labels in epochs}) > 1
    torch.testing.assert_close(dataset[0]["targets"].sum(), torch.tensor(1.0))
    assert float(dataset[0]["targets"].max()) == pytest.approx(0.9 + 0.1 / 3)
    other = ImageDataset(images, ALL, num_samples=15, seed=4)
    assert any(not torch.equal(dataset[i]["tokens"], other[i]["tokens"]) for i in range(5))


@pytest.mark.parametrize("crop", ["pad", "resized", "none"])
def test_batch_has_the_samples_that_are_read_alone(images, crop):
    settings = {"num_samples": 2000, "seed": 3, "label_smoothing": 0.1}
    dataset, alone = (ImageDataset(images, dataclasses.replace(ALL, crop=crop), **settings) for _ in range(2))
    numbers = [300, 7, 255, 256, 1999, 0]  # of several blocks of random numbers
    batch = dataset.batch(numbers)
    for place, number in enumerate(numbers):
        for key, value in alone[number].items():
            assert torch.equal(batch[key][place], value)


def test_no_two_samples_have_the_same_random_numbers(images):
    settings = {"num_samples": 10**6, "seed": 3}
    draws = ImageDataset(images, ALL, **settings)._draws(np.arange(1000))
    assert len(np.unique(draws)) == draws.size
    other = ImageDataset(images, ALL, **settings | {"seed": 4})._draws(np.arange(1000))
    assert not np.isin(other, draws).any()


def test_each_image_is_decoded_once_unless_its_crop_is_resized(images, monkeypatch):
    decoded = []
    image = images.image
    monkeypatch.setattr(images, "image", lambda row: decoded.append(row) or image(row))
    for crop, times in (("pad", 1), ("none", 1), ("resized", 3)):
        decoded.clear()
        dataset = ImageDataset(images, dataclasses.replace(ALL, crop=crop), num_samples=15)
        dataset.batch(range(15))
        assert sorted(decoded) == sorted(list(range(5)) * times)


def test_decoded_images_are_not_kept_above_the_limit_of_memory(images, monkeypatch):
    monkeypatch.setattr("data.images.dataset._CACHE_BYTES", 5 * 3 * 8 * 8 - 1)
    dataset = ImageDataset(images, ALL, num_samples=15)
    dataset.batch(range(5))
    assert not dataset._cached


def test_last_incomplete_validation_batch_repeats_an_image_without_weight(images):
    (batch,), (last,) = batches(
        ImageDataset(images, ALL, num_samples=None), global_batch_size=3, micro_batch_size=3, fill_last=True
    )
    assert batch["labels"].tolist() + last["labels"].tolist() == [0, 1, 2, 2, 1, 1]
    assert batch["loss_weight"].tolist() + last["loss_weight"].tolist() == [1, 1, 1, 1, 1, 0]


def test_shares_of_flips_erasures_and_places_are_those_of_the_settings():
    """4,000 samples of one image, whose left half is white: every random choice shows."""
    image = np.zeros((3, 8, 8), np.uint8)
    image[..., :4] = 255
    augmentation = Augmentation(
        8, crop="pad", padding=0, flip=0.3, random_erasing=0.25, mean=(0.5,) * 3, std=(0.5,) * 3
    )
    draws = np.random.default_rng(0).random((4000, augmentation.num_draws))
    pixels = augmentation.training([image] * 4000, draws)
    flipped, erased = pixels[:, 0, :, 7].amax(1) == 1, (pixels == 0).flatten(1).any(1)
    assert float(flipped.float().mean()) == pytest.approx(0.3, abs=0.03)
    assert float(erased.float().mean()) == pytest.approx(0.25, abs=0.03)
    assert float((flipped & erased).float().mean()) == pytest.approx(0.3 * 0.25, abs=0.02)  # independent
    point = np.zeros((3, 16, 16), np.uint8)
    point[:, 8, 8] = 255
    # The point is at each of the 8 x 8 places in 1 of 81 crops.
    shown = dataclasses.replace(augmentation, flip=0.0, random_erasing=0.0).training([point] * 4000, draws)
    counts = (shown[:, 0] == 1).sum(0)
    assert int(counts.sum()) == pytest.approx(4000 * 64 / 81, abs=120)
    assert 20 < int(counts.min()) <= int(counts.max()) < 85


def test_padded_crop_is_that_of_pillow():
    augmentation, image = Augmentation(8, crop="pad", padding=2), picture(0, 1)
    bordered = np.asarray(ImageOps.expand(image, 2))
    draws = np.random.default_rng(0).random((50, augmentation.num_draws))
    crops = augmentation.training([augmentation.read_training(image, draws[0])] * 50, draws)
    expected = [bordered[top : top + 8, left : left + 8] for top in range(5) for left in range(5)]
    found = {
        next(n for n, one in enumerate(expected) if np.array_equal(augmentation.restored(crop), one)) for crop in crops
    }
    assert len(found) > 15


def test_threads_read_the_same_samples(images):
    dataset = ImageDataset(images, ALL, num_samples=24, seed=3)  # more than four epochs
    sizes = {"global_batch_size": 6, "micro_batch_size": 3}
    for one, several in zip(batches(dataset, **sizes), batches(dataset, **sizes, threads=3), strict=True):
        for a, b in zip(one, several, strict=True):
            assert all(torch.equal(a[key], b[key]) for key in a)


def test_validation_reads_the_normalized_centre(images):
    sample = ImageDataset(images, Augmentation(8), num_samples=None, label_smoothing=0.1)[1]
    pixels = torch.tensor(np.array(picture(1, 1))).permute(2, 0, 1) / 255
    expected = (pixels - torch.tensor([0.485, 0.456, 0.406])[:, None, None]) / torch.tensor([0.229, 0.224, 0.225])[
        :, None, None
    ]
    torch.testing.assert_close(sample["tokens"], expected)
    assert sample.keys() == {"tokens", "labels", "loss_weight"}
    assert np.array_equal(Augmentation(8).restored(sample["tokens"]), np.array(picture(1, 1)))


def test_validation_crop_keeps_the_middle_of_larger_images():
    image = Image.fromarray(np.arange(20 * 40 * 3, dtype=np.uint32).reshape(20, 40, 3).astype(np.uint8))
    cut = Augmentation(16, validation_crop=0.8, mean=(0, 0, 0), std=(1, 1, 1))
    assert np.array_equal(cut.read_validation(image).transpose(1, 2, 0), np.array(image)[2:18, 12:28])
    assert cut.read_validation(image.resize((64, 32))).shape == (3, 16, 16)
    # A wide image keeps its proportions: three stripes of 20 columns have 10 at half the size, and the middle one is left.
    stripes = Image.fromarray(
        np.repeat(np.array([0, 100, 200], np.uint8), 20)[None, :, None].repeat(20, 0).repeat(3, 2)
    )
    pixels = Augmentation(10).read_validation(stripes)
    assert np.array_equal(pixels[:, :, 2:8], np.full((3, 10, 6), 100))


@pytest.mark.parametrize("crop", ["pad", "resized", "none"])
def test_random_crops_have_the_size_of_the_model(crop):
    for size in ((8, 8), (30, 17), (5, 9)):
        image = picture(0, 1, 40).resize(size)
        augmentation = Augmentation(8, crop=crop)
        draws = np.random.default_rng(1).random((1, augmentation.num_draws))
        pixels = augmentation.training([augmentation.read_training(image, draws[0])], draws)
        assert pixels.shape == (1, 3, 8, 8)
        assert pixels.dtype == torch.float32


@pytest.mark.parametrize(
    ("size", "box"), [((100, 10), (43, 0, 56, 10)), ((10, 100), (0, 43, 10, 56)), ((10, 12), (0, 0, 10, 12))]
)
def test_crop_that_fits_nowhere_is_the_largest_centre_of_an_allowed_shape(size, box):
    """Follow torchvision's RandomResizedCrop. The largest area with the largest aspect ratio fits nowhere."""
    assert _crop_box(picture(0, 1).resize(size), 0.08, np.full(22, 1 - 1e-9)) == box


def test_crops_have_areas_and_aspects_of_the_settings_and_lie_inside():
    image, random = Image.new("RGB", (100, 80)), np.random.default_rng(0)
    boxes = np.array([_crop_box(image, 0.1, random.random(22)) for _ in range(2000)])
    left, top, right, bottom = boxes.T
    assert (left.min(), top.min(), right.max(), bottom.max()) == (0, 0, 100, 80)
    area, aspect = (right - left) * (bottom - top) / 8000, (right - left) / (bottom - top)
    assert 0.09 < area.min() < 0.12
    assert area.max() > 0.9
    assert 0.73 < aspect.min() < 0.78
    assert 1.28 < aspect.max() < 1.36
    assert np.quantile(area, 0.1) == pytest.approx(0.19, abs=0.03)  # uniform, where all shapes fit


def test_erasing_sets_one_rectangle_to_the_mean():
    pixels = np.ones((40, 3, 16, 16), np.float32)
    draws = np.random.default_rng(0).random((40, 22))
    erase(pixels, np.arange(0, 40, 2), draws[::2])
    assert (pixels[1::2] == 1).all()
    for image in pixels[::2]:
        rows, columns = (np.flatnonzero((image[0] == 0).any(axis)) for axis in (1, 0))
        assert (image[:, rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1] == 0).all()
        assert image.sum() == 3 * (256 - len(rows) * len(columns))
        assert 0.01 * 256 < len(rows) * len(columns) < 0.4 * 256


def test_erased_rectangle_never_has_the_height_of_the_image():
    pixels, draws = np.ones((1, 3, 16, 16), np.float32), np.full((1, 22), 0.5)
    # 0.29 of the image: 15.6 rows in the first try, 8.6 in the second.
    draws[:, :2], draws[:, 10] = 0.87, 0.995
    erase(pixels, np.arange(1), draws)
    assert (pixels[0, 0] == 0).any(1).sum() == 9


@pytest.mark.parametrize("content", [b"no picture", None, encoded(picture(0, 0))[:60]])
def test_image_that_does_not_decode_is_named_with_file_and_row(tmp_path, content):
    good = encoded(picture(0, 0))
    first = write_parquet(tmp_path / "a.parquet", [0, 1])
    second = write_parquet(tmp_path / "b.parquet", [0, 1], images=[good, content])
    images = opened([str(first), str(second)])
    images.image(2)
    with pytest.raises(DamagedDataError, match=r"b\.parquet, row 1: the image does not decode"):
        images.image(3)


def test_full_disk_of_the_cache_is_no_damage(tmp_path, monkeypatch):
    def full(*_, **__):
        raise DatasetGenerationError("An error occurred") from OSError(errno.ENOSPC, "No space left on device")

    path = write_parquet(tmp_path / "a.parquet", [0, 1])
    monkeypatch.setattr("datasets.load_dataset", full)
    with pytest.raises(OSError, match="No space left") as error:
        opened(path)
    assert (error.value.errno, error.value.filename) == (errno.ENOSPC, str(tmp_path / "cache" / "images"))


def test_broken_file_in_a_folder_is_named(tmp_path):
    folder = write_folder(tmp_path / "train", 1)
    (folder / "green" / "0.png").write_bytes(b"GIF?")
    images = opened(folder)
    with pytest.raises(DamagedDataError, match=r"green/0\.png: the image does not decode"):
        images.image(int(np.flatnonzero(images.labels == images.class_names.index("green"))[0]))


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ([0, 1, 3], r"a\.parquet, row 2: label 3 \(rows with such labels: 1\); whole numbers from 0 to 2 are allowed"),
        ([0, -1, -1], r"row 1: label -1 \(rows with such labels: 2\)"),
        ([0, None, 3], r"row 1: label None \(rows with such labels: 2\)"),
        ([0, 3, None], r"row 1: label 3 \(rows"),
    ],
)
def test_label_outside_the_classes_is_named_with_file_and_row(tmp_path, labels, message):
    with pytest.raises(ValueError, match=message):
        opened(write_parquet(tmp_path / "a.parquet", labels, images=[encoded(picture(0, 0))] * 3))


def test_wrong_names_numbers_and_files_are_refused(tmp_path):
    path = write_parquet(tmp_path / "a.parquet", [0, 1])
    with pytest.raises(
        ValueError, match=r"model.vocab_size = 5: data.images.train has 3 classes; set 3, or leave it out"
    ):
        opened(path, 5)
    with pytest.raises(
        ValueError, match=r"data.images.image_key = photo: .* has the columns img, label; name one of them"
    ):
        opened(path, image_key="photo")
    with pytest.raises(ValueError, match=r"data.images.label_key = class: .* has the columns img, label; name one"):
        opened(path, label_key="class")
    assert not (tmp_path / "cache").exists(), "refused before the images are copied"
    with pytest.raises(ValueError, match=r"the column label holds no images"):
        opened(path, image_key="label")
    texts = pq.read_table(path).set_column(1, "label", pa.array(["red", None])).replace_schema_metadata(None)
    pq.write_table(texts, tmp_path / "texts.parquet")
    with pytest.raises(ValueError, match=r"label_key = label: this column of data.images.train holds string; whole"):
        opened(tmp_path / "texts.parquet")
    with pytest.raises(FileNotFoundError, match=r"data.images.train: .*absent does not exist"):
        find_images(str(tmp_path / "absent"), "data.images.train")
    for inside in ("empty", "empty/class", "empty/class/note.txt"):
        (tmp_path / inside).mkdir()
        with pytest.raises(ValueError, match="holds neither Parquet files nor folders of images"):
            find_images(str(tmp_path / "empty"), "data.images.train")
    (tmp_path / "cut.parquet").write_bytes(path.read_bytes()[:-20])
    pq.write_table(pq.read_table(path).slice(0, 0), tmp_path / "none.parquet")
    with pytest.raises(DamagedDataError, match=r"data.images.train: .*none.parquet has no row"):
        opened(tmp_path / "none.parquet")
    with pytest.raises(DamagedDataError, match=r"cut\.parquet cannot be read as Parquet"):
        opened(tmp_path / "cut.parquet")
