"""The task as published, checked example by example; the same examples on every call; a model that knows the answers scores 1."""

import numpy as np
import pytest
import torch
from torch import nn

from pdn_train import mqar
from pdn_train.config import ConfigError, build
from pdn_train.data import Loader
from pdn_train.mqar import Examples, MqarError, example

VOCAB = 8192


@pytest.mark.parametrize("pairs, length", [(64, 256), (32, 256), (5, 200), (1, 4)])
def test_an_example_is_as_published(pairs, length):
    inputs, labels = example(pairs, length, VOCAB, 0, "train", 3)
    assert inputs.shape == labels.shape == (length,) and inputs.dtype == labels.dtype == np.int64
    keys, values = inputs[0 : 2 * pairs : 2], inputs[1 : 2 * pairs : 2]
    assert len(set(keys)) == len(set(values)) == pairs
    assert keys.min() >= 1 and keys.max() < VOCAB // 2 <= values.min() and values.max() < VOCAB
    asked = np.flatnonzero(labels != -100)
    assert len(asked) == pairs and asked.min() >= 2 * pairs and (asked % 2 == 0).all()
    answers = dict(zip(keys, values, strict=True))
    assert set(inputs[asked]) == set(keys) and all(labels[i] == answers[inputs[i]] for i in asked)


def test_slots_are_drawn_by_their_weights():
    """The first draw is slot i with probability (i + 1)^-0.99 / sum; within 4 standard errors for the first five."""
    first = np.array([mqar._slots(8, 60, np.random.default_rng(i))[0] for i in range(8_000)])
    weights = np.arange(1, 61) ** -0.99
    share, expected = np.bincount(first, minlength=60) / len(first), weights / weights.sum()
    assert (np.abs(share - expected) < 4 * np.sqrt(expected / len(first)))[:5].all()
    drawn = mqar._slots(60, 60, np.random.default_rng(0))
    assert sorted(drawn) == list(range(60))


def test_examples_depend_on_seed_split_and_number_alone():
    def ids(*what):
        return example(8, 64, VOCAB, *what)[0].tolist()

    assert ids(1, "train", 5) == ids(1, "train", 5)
    assert len({tuple(ids(*what)) for what in ((1, "train", 5), (2, "train", 5), (1, "validation", 5), (1, "train", 6))}) == 4


def test_an_epoch_holds_every_example_once_in_a_new_order():
    source = Examples(4, 10, 32, 256, 7, "train")
    epochs = [[tuple(source.pair(10 * e + i)[0]) for i in range(10)] for e in range(2)]
    assert set(epochs[0]) == set(epochs[1]) == {tuple(example(4, 32, 256, 7, "train", i)[0]) for i in range(10)}
    assert epochs[0] != epochs[1] and len(set(epochs[0])) == 10
    assert [tuple(Examples(4, 10, 32, 256, 7, "train").pair(13)[0])] == [epochs[1][3]]  # a resumed run


def questions(labels: np.ndarray) -> int:
    return int((labels != -100).sum())


def test_training_climbs_in_its_first_half_and_what_is_held_out_is_whole():
    """12 steps of 5 rows from 2 pairs to 8: 3 steps of four examples of 2 pairs a row, 3 of two of 4, then one of 8."""
    data = {"mqar_pairs": 8, "mqar_fewest": 2, "seq_len": 50}
    config = build({"run_dir": "r", "data": data, "train": {"global_batch": 5, "steps": 12}, "optim": {"warmup_steps": 0}}, "test")
    train, held_out = mqar.open_examples(config)
    vocab, seed = config.model.vocab_size, config.data.seed
    rows = [train.pair(position) for position in range(60)]
    for position, (inputs, labels) in enumerate(rows):
        assert len(inputs) == len(labels) == 50 and questions(labels) == 8
        parts = {0: 4, 1: 2}.get(position // 15, 1)
        for start in range(0, 50 // parts * parts, 50 // parts):
            ids, asked = inputs[start : start + 50 // parts], labels[start : start + 50 // parts]
            pairs = 8 // parts
            answers = dict(zip(ids[0 : 2 * pairs : 2], ids[1 : 2 * pairs : 2], strict=True))
            assert questions(asked) == pairs == len(answers)
            assert all(asked[i] == answers[ids[i]] for i in np.flatnonzero(asked != -100))
        assert (labels[50 // parts * parts :] == -100).all()
    again = mqar.open_examples(config)[0]
    assert all(np.array_equal(again.pair(position)[0], rows[position][0]) for position in reversed(range(60)))  # a resumed run's
    assert all(np.array_equal(held_out.pair(n)[0], example(8, 50, vocab, seed, "validation", n)[0]) for n in range(10))


def test_rows_of_a_later_epoch_climb_too():
    """10 rows an epoch, 4 at 2 pairs, then 4 pairs: the rows of the first epoch do not come again."""
    source = Examples(4, 10, 32, 256, 7, "train", 2, 4)
    for position, (inputs, labels) in enumerate(source.pair(position) for position in range(24)):
        keys = inputs[0:8:2] if position >= 4 else [*inputs[0:4:2], *inputs[16:20:2]]
        assert {int(i) for i in inputs[labels != -100]} == {int(key) for key in keys}


def test_a_resumed_run_must_climb_as_before(make_config):
    """The length of a rung follows train.steps, which may change on resume elsewhere."""

    def prints(**data_or_steps):
        steps = data_or_steps.pop("steps", 12)
        data = {"mqar_pairs": 8, "seq_len": 48, **data_or_steps}
        return mqar.open_examples(make_config(data, steps))[0].fingerprint

    assert prints(mqar_fewest=2) != prints(mqar_fewest=4) != prints() != prints(mqar_fewest=2, steps=24) != prints(mqar_fewest=2)
    assert prints() == prints(steps=24) == {"mqar": {"pairs": 8, "examples": 100_000}}


@pytest.fixture
def make_config():
    def make(data, steps):
        return build({"run_dir": "r", "data": data, "train": {"steps": steps}, "optim": {"warmup_steps": 0}}, "test")

    return make


@pytest.mark.parametrize(
    "fewest, steps, said",
    [
        (5, 100, "data.mqar_fewest=5, doubled again and again, never is data.mqar_pairs=64: halve 64"),
        (128, 100, "data.mqar_fewest=128, doubled again and again, never is data.mqar_pairs=64"),
        (4, 7, "data.mqar_fewest=4 doubles 4 times in the first half of train.steps=7: take more steps"),
    ],
)
def test_a_climb_that_cannot_be_is_refused_before_anything_starts(make_config, fewest, steps, said):
    assert mqar.climb(4, 64) == (4, 8, 16, 32, 64) and mqar.climb(6, 6) == (6,)
    make_config({"mqar_pairs": 64, "mqar_fewest": 4}, 8)
    with pytest.raises(ConfigError, match=said):
        make_config({"mqar_pairs": 64, "mqar_fewest": fewest}, steps)


def test_the_loader_counts_labels_only():
    batch = Loader(Examples(4, 10, 32, 256, 0, "train"), 3, 1, 0, 1, False).step(0)[0]
    assert batch.input_ids.shape == (3, 32) and batch.targets == 12 == int((batch.labels != -100).sum())


class Oracle(nn.Module):
    """Answers by looking the key up in the pairs, but for every third question."""

    def __init__(self, pairs: int, vocab: int):
        super().__init__()
        self.pairs, self.config = pairs, type("Config", (), {"vocab_size": vocab})

    def forward(self, ids):
        keys, values = ids[:, 0 : 2 * self.pairs : 2], ids[:, 1 : 2 * self.pairs : 2]
        logits = torch.zeros(*ids.shape, self.config.vocab_size)
        match = ids[:, :, None] == keys[:, None]  # [B, T, N]
        answer = torch.where(match.any(-1), (match * values[:, None]).sum(-1), 0)
        answer = torch.where(answer % 3 == 0, 0, answer)
        return logits.scatter_(-1, answer[..., None], 1.0)


def test_accuracy_counts_every_question(monkeypatch):
    monkeypatch.setattr(mqar, "LOGITS", 3 * 48 * 300)  # three rows at once
    source = Examples(6, 20, 48, 300, 0, "validation")
    values = [source.pair(i)[1] for i in range(10)]
    values = np.concatenate([v[v != -100] for v in values])
    assert mqar.accuracy(Oracle(6, 300), source, 10, "cpu") == (values % 3 != 0).mean()


@pytest.mark.parametrize(
    "what, message",
    [
        ((9, 32, 256), "^9 pairs need an even length of at least 36 tokens, not 32: set data.seq_len so, or lower data.mqar_pairs to 8$"),
        ((4, 33, 256), "not 33: set data.seq_len so$"),
        ((8, 64, 16), r"a vocabulary of 16 \(model.vocab_size\) has 7: lower data.mqar_pairs$"),
        ((9, 32, 256, "--pairs", "--lengths"), "set --lengths so, or lower --pairs to 8$"),
        ((8, 64, 16, "--pairs", "--lengths"), "lower --pairs$"),
    ],
)
def test_impossible_examples_are_refused(what, message):
    with pytest.raises(MqarError, match=message):
        mqar.check(*what)


@pytest.mark.parametrize(
    "change, message", [({"seq_len": 14}, "4 pairs need .*, or lower data.mqar_pairs to 3$"), ({"mqar_pairs": 8}, "8 pairs need 8 keys")]
)
def test_a_configuration_with_impossible_examples_is_refused(change, message):
    tree = {"run_dir": "r", "data": {"mqar_pairs": 4, "seq_len": 32}, "model": {"vocab_size": 16}}
    assert build(tree, "x").data.mqar_pairs == 4
    with pytest.raises(ConfigError, match=message):
        build({**tree, "data": tree["data"] | change}, "x")


def test_shards_and_the_task_exclude_each_other():
    with pytest.raises(ConfigError, match="data.mqar_pairs=4 makes its own samples"):
        build({"run_dir": "r", "data": {"path": "d", "mqar_pairs": 4}}, "x")
    assert build({"run_dir": "r", "data": {"mqar_pairs": 4}, "eval": {"every": 5}}, "x").data.mqar_examples == 100_000
