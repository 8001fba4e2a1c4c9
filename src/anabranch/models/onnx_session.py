"""ONNX Runtime sessions with bounded threads, and batches of texts of similar length."""

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import onnxruntime as ort

# Larger batches save nothing, and are slower for long texts.
BATCH_TOKENS = 512
ERRORS_ONLY = 3

Ids = npt.NDArray[np.int32]


def session(model: bytes | str, threads: int = 1) -> ort.InferenceSession:
    """A session for a model, given as bytes or as a path."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = ERRORS_ONLY
    # Memory patterns are kept per batch shape, and there are thousands of shapes.
    options.enable_mem_pattern = False
    # Idle threads must not spin.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def batches(lengths: Sequence[int]) -> Iterator[list[int]]:
    """Batches of text indexes, shortest texts first, up to BATCH_TOKENS with padding."""
    batch: list[int] = []
    for number in sorted(range(len(lengths)), key=lengths.__getitem__):
        if batch and (len(batch) + 1) * lengths[number] > BATCH_TOKENS:
            yield batch
            batch = []
        batch.append(number)
    if batch:
        yield batch


def padded(texts: Sequence[Ids], pad: int = 0) -> tuple[Ids, Ids]:
    """The ids of all texts in one padded array, and its attention mask."""
    ids = np.full((len(texts), max(map(len, texts))), pad, np.int32)
    mask = np.zeros_like(ids)
    for row, text in enumerate(texts):
        ids[row, : len(text)] = text
        mask[row, : len(text)] = 1
    return ids, mask
