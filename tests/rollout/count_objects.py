"""Prints how many Python objects are alive at once while an answer is read: base64 with few and many candidates, then nested."""

import sys

import numpy as np
import orjson

from miles_sc.rollout.answer import read_generated_tokens
from tests.samples import in_form

ROWS, FEW, MANY, VOCABULARY = 64, 8, 128, 1000


def answer_of(rows, k, form):
    """The likeliest token of each row is sampled; every id differs from its neighbours', in the row and below it."""
    log_probs = -np.log(2 * k) - np.linspace(0, 1, k, dtype=np.float32)
    ids = [[(7 * row + 3 * slot) % VOCABULARY for slot in range(k)] for row in range(rows)]
    top = [[[float(value), token, None] for value, token in zip(log_probs, row, strict=True)] for row in ids]
    return in_form(
        {
            "output_token_logprobs": [[row[0][0], row[0][1], None] for row in top],
            "output_top_logprobs": top,
            "completion_tokens": rows,
        },
        form,
    )


def most_objects(rows, k, form):
    """How many small objects are alive at once while an answer's bytes are read, seen at every call and return on the way."""
    body, counts = orjson.dumps(answer_of(rows, k, form)), []

    def look(*_):
        counts[-1] = max(counts[-1], sys.getallocatedblocks() - before)

    for _ in range(3):
        before = sys.getallocatedblocks()
        counts.append(0)
        sys.setprofile(look)
        try:
            read_generated_tokens(orjson.loads(body), k=k, vocab_size=VOCABULARY)
        finally:
            sys.setprofile(None)
    return min(counts)  # the first reading also makes what is made once


if __name__ == "__main__":
    print(*(most_objects(ROWS, k, form) for form in ("b64", "nested") for k in (FEW, MANY)))
