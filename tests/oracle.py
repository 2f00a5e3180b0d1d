"""Executable specification of the weight formats, the E8 rotation and the expert, in numpy.

Written from docs/formats.md, not from the library, and sharing no code with it: the tests compare the two. It aims to
be read, not to be fast. Matrices are [O, I], row-major: O rows (outputs) of I columns (inputs).

Where the description fixes the float32 arithmetic, `decode(np.float32)` gives the exact bits; by default it gives the
float64 value that the bytes stand for.
"""

import hashlib
from dataclasses import dataclass, field

import numpy as np

# Names in the order of their numbers in the C ABI. "int4-g64" stands for every group size.
FORMATS = ("f32", "int8", "int4", "int2", "int4-g64", "int3-g64", "e8", "mxfp4", "fp8-e4m3-b128")

# ---- geometry ----


def ceil_div(a, b):
    return -(-a // b)


def split_name(fmt):
    """("int4-g", 32) for "int4-g32"; (fmt, None) for every other format."""
    if fmt.startswith("int4-g"):
        return "int4-g", int(fmt.removeprefix("int4-g"))
    return fmt, None


def abi_number(fmt):
    """The format's number in the C ABI."""
    return FORMATS.index("int4-g64" if fmt.startswith("int4-g") else fmt)


def row_bytes(fmt, columns):
    """Bytes of the weights of one row, scales apart."""
    family, _ = split_name(fmt)
    return {
        "f32": 4 * columns,
        "int8": columns,
        "int4": ceil_div(columns, 2),
        "int2": ceil_div(columns, 4),
        "int4-g": ceil_div(columns, 2),
        "int3-g64": 24 * ceil_div(columns, 64),
        "e8": 98 * ceil_div(columns, 256),
        "mxfp4": ceil_div(columns, 2),
        "fp8-e4m3-b128": columns,
    }[family]


def scale_layout(fmt, shape):
    """(shape, dtype) of the scales, or None where the format has none."""
    rows, columns = shape
    family, group_size = split_name(fmt)
    return {
        "f32": None,
        "int8": ((rows,), np.float32),
        "int4": ((rows,), np.float32),
        "int2": ((rows,), np.float32),
        "int4-g": ((rows, ceil_div(columns, group_size or 1)), np.float32),
        "int3-g64": ((rows, ceil_div(columns, 64)), np.float32),
        "e8": None,
        "mxfp4": ((rows, ceil_div(columns, 32)), np.uint8),
        "fp8-e4m3-b128": ((ceil_div(rows, 128), ceil_div(columns, 128)), np.float32),
    }[family]


def _bits(byte_rows):
    """Bits of each row, lowest bit of the first byte first: [rows, bytes] -> [rows, 8 * bytes]."""
    return np.unpackbits(byte_rows, axis=-1, bitorder="little")


def _from_bits(bits):
    """Little-endian integers from the last axis: bit 0 first."""
    return bits.astype(np.int64) @ (1 << np.arange(bits.shape[-1], dtype=np.int64))


# ---- integer formats ----

# Bits of a code; the largest code (the smallest is -largest - 1); columns that share a scale (None: the whole row).
_INTEGERS = {"int8": (8, 127, None), "int4": (4, 7, None), "int2": (2, 1, None), "int3-g64": (3, 3, 64)}


def _integer_parameters(fmt, columns):
    family, group_size = split_name(fmt)
    bits, largest, group = _INTEGERS["int4" if family == "int4-g" else family]
    return bits, largest, group_size or group or columns


def integer_codes(fmt, data, shape):
    """The signed codes q [O, I] of an integer format."""
    rows, columns = shape
    byte_rows = np.frombuffer(data, np.uint8).reshape(rows, row_bytes(fmt, columns))
    bits, largest, _ = _integer_parameters(fmt, columns)
    if fmt == "int8":
        return byte_rows.view(np.int8).astype(np.int64)
    if fmt == "int3-g64":
        groups = byte_rows.reshape(rows, -1, 24)
        low = _from_bits(_bits(groups[..., :16]).reshape(rows, -1, 64, 2))
        high = _bits(groups[..., 16:]).astype(np.int64)
        stored = (low + 4 * high).reshape(rows, -1)
    else:
        stored = _from_bits(_bits(byte_rows).reshape(rows, -1, bits))
    return stored[:, :columns] - (largest + 1)


def _decode_integers(fmt, data, scales, shape, dtype):
    columns = shape[1]
    _, _, group = _integer_parameters(fmt, columns)
    column_scales = np.repeat(scales.reshape(shape[0], -1), group, axis=1)[:, :columns]
    return integer_codes(fmt, data, shape).astype(dtype) * column_scales.astype(dtype)


def quantise(fmt, w):
    """Codes [O, I] and scales that encoding the float32 matrix `w` gives: all arithmetic in float32, ties to even."""
    w = np.asarray(w, np.float32)
    rows, columns = w.shape
    _, largest, group = _integer_parameters(fmt, columns)
    groups = ceil_div(columns, group)
    padded = np.zeros((rows, groups * group), np.float32)
    padded[:, :columns] = w
    padded = padded.reshape(rows, groups, group)
    scales = np.maximum(np.abs(padded).max(axis=2) / np.float32(largest), np.float32(1e-8))
    codes = np.clip(np.rint(padded / scales[:, :, None]), -largest - 1, largest).astype(np.int64)
    return codes.reshape(rows, -1)[:, :columns], scales.reshape(scale_layout(fmt, w.shape)[0])


# ---- floating-point formats ----


def _e4m3_table():
    """Values of the 256 fp8-e4m3fn bytes: exponent bias 7, no infinities, 0x7f and 0xff are NaN."""
    table = np.empty(256)
    for byte in range(256):
        exponent, mantissa = byte >> 3 & 15, byte & 7
        magnitude = mantissa * 2.0**-9 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10)
        table[byte] = np.nan if byte & 0x7F == 0x7F else -magnitude if byte & 0x80 else magnitude
    return table


E4M3 = _e4m3_table()
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def ue8m0(codes):
    """Powers of two whose float32 exponent field is the code: 0 -> 0, 255 -> infinity, otherwise 2^(code - 127)."""
    return (np.asarray(codes, np.uint32) << 23).view(np.float32)


def _nearest(values, magnitudes):
    """Index of the value nearest to each magnitude; half-way the even index, beyond the last value the last one."""
    halves = (values[:-1] + values[1:]) / 2
    index = np.searchsorted(halves, magnitudes)  # a magnitude on a half counts as below it
    tie = (index < len(halves)) & (magnitudes == halves[np.minimum(index, len(halves) - 1)])
    return index + (tie & (index % 2 == 1))


def encode_mxfp4(w):
    """Bytes and scales of `w` [O, I].

    The scale of a group of 32 follows the OCP microscaling rule: 2^(floor(log2 amax) - 2), where 2 is the exponent of
    6, the largest e2m1. Its byte is at least 1, since 0 decodes as zero; a group of zeros alone has 0. A weight becomes
    the e2m1 nearest to weight / scale, on ties that with the even code, above 6 always 6; it keeps its sign, zeros too.
    In an odd row the last high nibble is 0.
    """
    w = np.asarray(w, np.float32).astype(np.float64)
    rows, columns = w.shape
    groups = ceil_div(columns, 32)
    padded = np.zeros((rows, groups, 32))
    padded.reshape(rows, -1)[:, :columns] = w
    largest = np.abs(padded).max(axis=2)
    exponents = np.frexp(largest)[1] - 1  # floor(log2)
    scales = np.where(largest > 0, np.maximum(exponents - 2 + 127, 1), 0).astype(np.uint8)
    divided = padded * 2.0 ** (127 - scales.astype(np.int64))[:, :, None]
    nibbles = _nearest(E2M1[:8], np.abs(divided)) + 8 * np.signbit(padded)
    nibbles = nibbles.reshape(rows, -1)[:, : 2 * ceil_div(columns, 2)]
    return (nibbles[:, 0::2] | nibbles[:, 1::2] << 4).astype(np.uint8).ravel(), scales


def encode_fp8(w):
    """Bytes and scales of `w` [O, I].

    The scale of a block of 128 x 128 is amax / 448, which makes amax the largest e4m3, but at least the smallest normal
    float32, 2^-126. A weight becomes the e4m3 nearest to weight / scale, on ties that with the even code, above 448
    always 448; it keeps its sign, zeros too. Both quotients are float32.
    """
    w = np.asarray(w, np.float32)
    rows, columns = w.shape
    row_starts, column_starts = range(0, rows, 128), range(0, columns, 128)
    blocks = [[np.abs(w[r : r + 128, c : c + 128]).max() for c in column_starts] for r in row_starts]
    scales = np.maximum(np.array(blocks, np.float32) / np.float32(448), np.float32(2.0**-126))
    divided = w / np.repeat(np.repeat(scales, 128, axis=0)[:rows], 128, axis=1)[:, :columns]
    codes = _nearest(E4M3[:127], np.abs(divided)) + 128 * np.signbit(w)
    return codes.astype(np.uint8).ravel(), scales


def _decode_f32(data, shape, dtype):
    return np.frombuffer(data, "<f4").reshape(shape).astype(dtype)


def _decode_mxfp4(data, scales, shape, dtype):
    rows, columns = shape
    byte_rows = np.frombuffer(data, np.uint8).reshape(rows, -1)
    nibbles = _from_bits(_bits(byte_rows).reshape(rows, -1, 4))[:, :columns]
    column_scales = np.repeat(ue8m0(scales), 32, axis=1)[:, :columns]
    return E2M1[nibbles].astype(dtype) * column_scales.astype(dtype)


def _decode_fp8(data, scales, shape, dtype):
    rows, columns = shape
    values = E4M3[np.frombuffer(data, np.uint8).reshape(shape)]
    block_scales = np.repeat(np.repeat(scales, 128, axis=0)[:rows], 128, axis=1)[:, :columns]
    return values.astype(dtype) * block_scales.astype(dtype)


# ---- E8 ----

# Level numbers of the 256 entries, four weights each.
_LEVEL_DIGITS = """
0000 2000 4000 1100 3100 7100 0200 2200 1300 2400 3700 5700 1010 3010 0110 2110
1210 5210 0310 2310 1410 4510 0710 0020 2020 4020 1120 0220 2220 1320 3320 7320
1520 7520 5720 1030 7030 0130 2130 5230 0730 3140 7340 4440 7540 3740 5740 1050
7050 2350 2550 5360 4660 0170 4170 6170 3470 1670 1001 3001 0101 2101 1201 3201
0301 2301 4301 7401 0501 0011 2011 1111 0211 2211 1021 3021 0121 2121 1221 0321
2721 0031 2031 0231 1331 6431 6631 1041 5041 0541 0251 4251 6451 1751 5061 2271
0471 0002 2002 1102 3102 0202 2202 6202 1302 2402 1012 3012 5012 0112 2112 1212
0312 3612 7612 0712 0022 2022 1122 7122 0222 2222 7322 0422 5522 1032 0132 4132
0732 4732 5342 3542 3052 7252 1452 4752 1072 3072 6172 5472 1003 0103 2103 1203
3203 0503 5603 2703 0013 2013 0213 1313 4413 6413 1023 3023 0123 5223 2523 2723
1133 3333 0343 7443 2743 0053 6053 2253 5553 4163 6363 3663 3373 0673 4004 7104
5304 7304 3504 7504 4714 0224 7324 0424 0624 6624 7034 5434 4044 1544 4644 5254
3454 0754 5074 0174 2174 0374 2105 1405 0705 0015 6015 6215 5515 4125 2325 2725
2035 3535 0145 3245 7245 2745 2055 1355 0565 4275 2475 4206 4406 6406 4606 1216
1616 7126 4626 0336 6336 4446 5056 2556 3366 3076 1276 3007 5007 7007 0107 2307
2507 6217 0417 2127 5427 2527 0037 5137 3337 0637 1247 1447 0057 2057 4257 0367
"""
_LEVELS = np.array([4, 12, 20, 28, 36, 44, 52, 62], np.uint8)

# The published codebook [256, 4]: doubled magnitudes.
CODEBOOK = _LEVELS[[[int(digit) for digit in entry] for entry in _LEVEL_DIGITS.split()]]
CODEBOOK.setflags(write=False)
assert hashlib.sha256(CODEBOOK.tobytes()).hexdigest() == (
    "46e35f5a997efdee6c99ce57854c8a0d4f0ff8ca57e5e8a60c0793ea580acf5d"
)


def e8_fields(data):
    """Takes super-blocks apart: indices [N, 8, 8], sign fields [N, 8, 4], sub-scale codes [N, 8], super-scales [N]."""
    blocks = np.frombuffer(data, np.uint8).reshape(-1, 98)
    words = _bits(blocks[:, 64:96]).reshape(-1, 8, 32)
    return (
        blocks[:, :64].reshape(-1, 8, 8),
        _from_bits(words[..., :28].reshape(-1, 8, 4, 7)),
        _from_bits(words[..., 28:]),
        np.ascontiguousarray(blocks[:, 96:98]).view("<f2")[:, 0],
    )


def e8_blocks(indices, sign_fields, codes, super_scales):
    """Puts super-blocks together from what `e8_fields` gives: bytes [98 * N]."""
    count = len(super_scales)
    words = np.asarray(codes, np.uint32) << 28
    for lane in range(4):
        words = words | np.asarray(sign_fields, np.uint32)[..., lane] << (7 * lane)
    blocks = np.empty((count, 98), np.uint8)
    blocks[:, :64] = np.asarray(indices, np.uint8).reshape(count, 64)
    blocks[:, 64:96] = words.astype("<u4").view(np.uint8).reshape(count, 32)
    blocks[:, 96:] = np.asarray(super_scales, "<f2").view(np.uint8).reshape(count, 2)
    return blocks.ravel()


def e8_lane_negative(sign_fields):
    """Which of a lane's eight weights are negative [..., 8]: seven stored bits; the eighth makes their number even."""
    seven = np.asarray(sign_fields)[..., None] >> np.arange(7) & 1
    return np.concatenate([seven, seven.sum(-1, keepdims=True) % 2], axis=-1).astype(bool)


def _decode_e8(data, shape, codebook, dtype):
    """Magnitude (byte / 2) * db with db = d * (0.5 + code) * 0.5. Every step fits 24 bits, so float32 is exact too."""
    rows, columns = shape
    indices, sign_fields, codes, super_scales = e8_fields(data)
    magnitudes = codebook[indices].reshape(-1, 8, 32).astype(dtype) * dtype(0.5)
    with np.errstate(invalid="ignore"):  # 0 * infinity is NaN, as it should be
        sub_scales = super_scales.astype(dtype)[:, None] * (dtype(0.5) + codes.astype(dtype)) * dtype(0.5)
        weights = magnitudes * sub_scales[..., None]
    negative = e8_lane_negative(sign_fields).reshape(-1, 8, 32)
    return np.where(negative, -weights, weights).reshape(rows, -1)[:, :columns]


def encode_e8(w):
    """The reference encoder: bytes for `w` [O, I], rotated or not, rows padded with zeros to whole super-blocks."""
    w = np.asarray(w, np.float64)
    padded = np.zeros((w.shape[0], 256 * ceil_div(w.shape[1], 256)))
    padded[:, : w.shape[1]] = w
    return np.concatenate([_encode_super_blocks(chunk) for chunk in _chunks(padded.reshape(-1, 256), 64)])


def _chunks(array, size):
    return (array[i : i + size] for i in range(0, len(array), size))


def _encode_super_blocks(w):
    count = len(w)
    magnitudes = np.abs(w)

    # Every lane needs an even number of negatives: where it is odd, the smallest magnitude gets the wrong sign.
    negative = (w < 0).reshape(count, 32, 8)
    odd = negative.sum(-1) % 2 == 1
    smallest = magnitudes.reshape(count, 32, 8).argmin(-1)
    block, lane = np.nonzero(odd)
    negative[block, lane, smallest[block, lane]] ^= True
    sign_fields = _from_bits(negative[..., :7]).reshape(count, 8, 4)

    super_scales = (np.sqrt((magnitudes**2).mean(-1)) / 20 + 1e-12).astype(np.float16)
    d = super_scales.astype(np.float64)[:, None]

    # Per sub-block: all sixteen sub-scales, for each the best entry of every group of four; first one on ties.
    entries = CODEBOOK / 2.0
    norms = (entries**2).sum(-1)
    projections = magnitudes.reshape(count, 8, 8, 4) @ entries.T
    best_error = np.full((count, 8), np.inf)
    best_code = np.zeros((count, 8), np.int64)
    best_indices = np.zeros((count, 8, 8), np.int64)
    for code in range(16):
        db = np.maximum(d * (0.5 + code) * 0.5, 1e-20)[..., None, None]
        indices = (db * norms - 2 * projections).argmin(-1)
        projection = np.take_along_axis(projections, indices[..., None], -1)[..., 0]
        db = db[..., 0]
        error = (db**2 * norms[indices] - 2 * db * projection).sum(-1)
        better = error < best_error
        best_error[better] = error[better]
        best_code[better] = code
        best_indices[better] = indices[better]
    return e8_blocks(best_indices, sign_fields, best_code, super_scales)


# ---- encoded matrices ----


@dataclass
class Encoded:
    """A matrix as bytes. `scales` has the natural shape of its format, or is None."""

    fmt: str
    shape: tuple
    data: np.ndarray
    scales: np.ndarray | None = None
    codebook: np.ndarray = field(default_factory=lambda: CODEBOOK, repr=False)
    rotated: bool = True

    @property
    def group_size(self):
        return split_name(self.fmt)[1]

    @property
    def nbytes(self):
        return self.data.nbytes + (0 if self.scales is None else self.scales.nbytes)

    def decode(self, dtype=np.float64):
        """The stored matrix [O, I]: exact in float64; the bits that the description fixes in float32."""
        family, _ = split_name(self.fmt)
        if family == "f32":
            return _decode_f32(self.data, self.shape, dtype)
        if family == "e8":
            return _decode_e8(self.data, self.shape, self.codebook, dtype)
        with np.errstate(invalid="ignore", over="ignore", under="ignore"):
            if family == "mxfp4":
                return _decode_mxfp4(self.data, self.scales, self.shape, dtype)
            if family == "fp8-e4m3-b128":
                return _decode_fp8(self.data, self.scales, self.shape, dtype)
            return _decode_integers(self.fmt, self.data, self.scales, self.shape, dtype)


def random_bytes(rng, fmt, shape):
    """A matrix of which every bit may be set, those that pad its rows too; infinities and NaN occur."""
    data = rng.integers(0, 256, shape[0] * row_bytes(fmt, shape[1]), dtype=np.uint8)
    scales = None
    if layout := scale_layout(fmt, shape):
        scale_shape, dtype = layout
        size = int(np.prod(scale_shape)) * np.dtype(dtype).itemsize
        scales = rng.integers(0, 256, size, dtype=np.uint8).view(dtype).reshape(scale_shape)
    return Encoded(fmt, shape, data, scales)


def random_encoded(rng, fmt, shape, magnitude=1.0, codebook=CODEBOOK):
    """A matrix of random bytes whose weights are finite and about `magnitude`; every code of the format may occur."""
    rows, columns = shape
    data = rng.integers(0, 256, rows * row_bytes(fmt, columns), dtype=np.uint8)
    if fmt == "f32":
        data = (magnitude * rng.standard_normal(shape)).astype("<f4").view(np.uint8).ravel()
    elif fmt == "e8":
        d = magnitude * rng.uniform(0.005, 0.01, data.size // 98)
        data.reshape(-1, 98)[:, 96:] = d.astype("<f2").view(np.uint8).reshape(-1, 2)
    elif fmt == "fp8-e4m3-b128":
        data[data & 0x7F == 0x7F] ^= 1  # the two NaNs
    scales = None
    if layout := scale_layout(fmt, shape):
        scale_shape, dtype = layout
        if dtype == np.uint8:
            middle = 127 + round(np.log2(magnitude))
            scales = rng.integers(middle - 3, middle + 2, scale_shape, dtype=np.uint8)
        else:
            typical = {"int8": 74, "int4": 4.6, "int2": 1.2, "int3-g64": 2.3, "fp8-e4m3-b128": 80}.get(fmt, 4.6)
            scales = (rng.uniform(0.5, 1.5, scale_shape) * magnitude / typical).astype(np.float32)
    return Encoded(fmt, tuple(shape), data, scales, codebook)


# ---- rotation ----

LARGEST_BLOCK = 32768


def rotation_blocks(dim):
    """Sizes of the blocks of a dimension: each the lowest set bit of what remains, halved until it fits the cap."""
    sizes = []
    while dim:
        sizes.append(min(dim & -dim, LARGEST_BLOCK))
        dim -= sizes[-1]
    return sizes


def sign_bytes(n):
    """The sign stream of a block of n elements: one bit an element, lowest bit first, from a 64-bit xorshift*."""
    state, mask, stream = 417 + n, 2**64 - 1, bytearray()
    for _ in range(ceil_div(n, 8)):
        state ^= state >> 12
        state ^= state << 25 & mask
        state ^= state >> 27
        stream.append((state * 2685821657736338717 & mask) >> 56)
    return bytes(stream)


def signs(n):
    """+1 or -1 for each element of a block."""
    return 1.0 - 2.0 * _bits(np.frombuffer(sign_bytes(n), np.uint8))[:n]


def hadamard(n):
    """The Sylvester matrix [n, n] of +-1: entry (i, j) is negative where i & j has an odd number of bits."""
    i = np.arange(n)
    parity = _bits((i[:, None] & i).astype("<u4").view(np.uint8).reshape(n, n, 4)).sum(-1) % 2
    return 1.0 - 2.0 * parity


def walsh_hadamard(x):
    """hadamard(n) @ x along the last axis by butterflies."""
    x = np.array(x, np.float64)
    n, stride = x.shape[-1], 1
    while stride < n:
        pairs = x.reshape(*x.shape[:-1], n // (2 * stride), 2, stride)
        u, v = pairs[..., 0, :].copy(), pairs[..., 1, :].copy()
        pairs[..., 0, :], pairs[..., 1, :] = u + v, u - v
        stride *= 2
    return x


def _block_slices(dim):
    start = 0
    for n in rotation_blocks(dim):
        yield n, slice(start, start + n)
        start += n


def rotate(x):
    """Flips signs, transforms and scales by 1/sqrt(n), block by block along the last axis. Float64."""
    y = np.array(x, np.float64)
    for n, block in _block_slices(y.shape[-1]):
        y[..., block] = walsh_hadamard(y[..., block] * signs(n)) / np.sqrt(n)
    return y


def unrotate(y):
    """The inverse of `rotate`."""
    x = np.array(y, np.float64)
    for n, block in _block_slices(x.shape[-1]):
        x[..., block] = walsh_hadamard(x[..., block]) / np.sqrt(n) * signs(n)
    return x


# ---- the expert ----


def silu(z):
    with np.errstate(over="ignore"):
        return z / (1 + np.exp(-z))


def expert(x, gate, up, down):
    """down(silu(gate x) * (up x)) for `Encoded` matrices as the C ABI has it, in float64: x meets gate and up as it is;
    the hidden rows are rotated where down is E8 and stored rotated."""
    x = np.asarray(x, np.float64)
    hidden = silu(x @ gate.decode().T) * (x @ up.decode().T)
    if down.fmt == "e8" and down.rotated:
        hidden = rotate(hidden)
    return hidden @ down.decode().T


def expert_mxfp4(x, gate, up, down, b1, b2):
    """The expert with the bounded activation b1 tanh(g / b1) sigmoid(g) * b2 tanh(u / b2)."""
    x = np.asarray(x, np.float64)
    g, u = x @ gate.decode().T, x @ up.decode().T
    return (b1 * np.tanh(g / b1) / (1 + np.exp(-g)) * b2 * np.tanh(u / b2)) @ down.decode().T


def relative_rms(actual, expected):
    """Root mean square of the error over that of the expected values."""
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    error, size = ((actual - expected) ** 2).mean(), (expected**2).mean()
    return np.sqrt(error / size) if size else 0.0 if error == 0 else np.inf


# ---- Routing ----


def route(logits, kind, top_k, renormalise=False, groups=0, top_groups=0, bias=None, scale=1.0):
    """Experts of one row, best first, and their weights: the definition, word for word."""
    logits = np.asarray(logits, np.float64)
    exponentials = np.exp(logits - logits.max())
    scores = exponentials / exponentials.sum() if kind == "softmax" else 1 / (1 + np.exp(-logits))
    choice = scores if bias is None else scores + np.asarray(bias, np.float64)
    allowed = range(len(logits))
    if groups:
        size = len(logits) // groups
        best = 1 if kind == "softmax" else 2
        values = [sorted(choice[g * size : (g + 1) * size], reverse=True)[:best] for g in range(groups)]
        kept = sorted(range(groups), key=lambda g: (-sum(values[g]), g))[:top_groups]
        allowed = [e for e in allowed if e // size in kept]
    ids = sorted(allowed, key=lambda e: (-choice[e], e))[:top_k]
    weights = scores[ids] * scale / (scores[ids].sum() if renormalise else 1)
    return ids, weights
