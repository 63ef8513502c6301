"""Packed rows of answers with all columns that losses of answers read; NaN where nothing counts."""

import torch

V, D = 11, 6
# Documents of each row: 2j and 2j + 1 are a pair. The prompt of each has one or two tokens.
LENGTHS = ((5, 3, 4, 6), (3, 7), (4, 4, 6, 3))
ROW = 20


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def weight_of():
    return drawn(V, D, seed=9).mul(0.5).requires_grad_()


def make_answers(lengths=LENGTHS, row=ROW):
    """Return rows of documents, every value of which follows from its document and its place."""
    batch = {"labels": torch.full((len(lengths), row), -100), "x": drawn(len(lengths), row, D)}
    batch["document_ids"] = torch.full((len(lengths), row), -1)
    batch["position_ids"] = torch.zeros(len(lengths), row, dtype=torch.int64)
    names = ("reference_logprobs", "old_logprobs", "sampler_logprobs", "advantages")
    names += ("desirable", "kl", "weights")
    for name in names:
        batch[name] = torch.full((len(lengths), row), torch.nan, dtype=torch.float64)
    number = 0
    for index, documents in enumerate(lengths):
        begin = 0
        for document, length in enumerate(documents):
            values = fields(number, length)
            here = slice(begin, begin + length)
            batch["document_ids"][index, here] = document
            batch["position_ids"][index, here] = torch.arange(length)
            for name, value in values.items():
                batch[name][index, here] = value
            begin, number = begin + length, number + 1
    return batch


def fields(number, length):
    """Return what the tokens of a document hold: the prompt and the last token have no label."""
    labels = torch.randint(V, (length,), generator=torch.Generator().manual_seed(number))
    labels[: 1 + number % 2] = labels[-1] = -100
    off = [0.3 * drawn(length, seed=10 * number + i) for i in range(3)]
    base = torch.log(torch.tensor(1 / V)).double()
    columns = {
        "reference_logprobs": base + off[0],
        "old_logprobs": base + off[1],
        "sampler_logprobs": base + off[1] + 0.1 * off[2],
        "advantages": drawn(1, seed=500 + number).expand(length),
        "desirable": torch.tensor(float(number % 3 > 0)).double().expand(length),
        "kl": torch.full((length,), 0.05, dtype=torch.float64),
        "weights": 1.2 + off[2].sin(),
    }
    nothing = labels == -100
    columns = {name: x.masked_fill(nothing, torch.nan) for name, x in columns.items()}
    return {"labels": labels, "x": drawn(length, D, seed=1000 + number), **columns}


def documents_of(batch):
    """Return (row, place) of each document, place a slice."""
    found = []
    for row, ids in enumerate(batch["document_ids"]):
        for document in range(int(ids.max()) + 1):
            places = (ids == document).nonzero()[:, 0]
            found.append((row, slice(int(places[0]), int(places[-1]) + 1)))
    return found


def unpacked(batch, together=2):
    """Return a batch in which so many of the documents share a row, the rest padding."""
    places = documents_of(batch)
    lengths = [p.stop - p.start for _, p in places]
    rows = [tuple(lengths[i : i + together]) for i in range(0, len(lengths), together)]
    return make_answers(rows, row=max(map(sum, rows)))


def part_of(batch, rows):
    return {name: x[rows] for name, x in batch.items()}


def cut(batch, share):
    """Give a rank of two parts of every document: as ring and Ulysses do, places apart."""
    return {name: x[:, share.index :: share.count] for name, x in batch.items()}
