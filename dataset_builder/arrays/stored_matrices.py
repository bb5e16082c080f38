"""Small matrices without a short formula; the tests verify each of them.

All were found by computer search. The sources are those that first showed that such a matrix exists.
"""

import numpy as np

from vramcast.dataset_builder.arrays.fields import IntArray

# D(12, 12, 3): Seiden, "On the problem of construction of orthogonal arrays", Ann. Math. Stat. 25 (1954).
_TWELVE_OVER_THREE = """
000000000000 000011112222 000102221112 001220120121 010221202011 012012020211
012120012102 012202111020 021020211210 021102102201 021211021002 022111200120"""

# D(12, 12, 4) over Z2 x Z2, a generalised Hadamard matrix: de Launay, in Colbourn & Dinitz (eds.), "Handbook
# of Combinatorial Designs" (2nd ed. 2007), chapter V.5.
_TWELVE_OVER_FOUR = """
000000000000 000111222333 000222333111 012123013023 012231130230 012312301302
023013123201 023130231012 023301312120 031032210321 031203021132 031320102213"""

# D(12, 6, 12) over Z2 x Z2 x Z3, transposed (a word is a column, in base 12): Johnson, Dulmage & Mendelsohn,
# "Orthomorphisms of groups and orthogonal Latin squares I", Canad. J. Math. 13 (1961).
_TWELVE_OVER_TWELVE = """
000000000000 0123456789ab 021687a9b435 03b1a6724598 0a7914b83256 0b64915a7382"""

# First rows of the symmetric circulants in Williamson's array of order 4 * 23: Baumert, Golomb & Hall,
# "Discovery of an Hadamard matrix of order 92", Bull. Amer. Math. Soc. 68 (1962).
_WILLIAMSON_23 = """
+--++-+-+------+-+-++-- +-+--+++++----+++++--+- +-+++--++-+--+-++--+++- +++++-++---++---++-++++"""

# OA(4m, m^1 2^f): a word is a two-level column, with one letter for each level of the m-level column. A
# letter is one of the three ways to halve four runs (a: 0011, b: 0101, c: 0110), a capital its complement.
# The sizes are those in Kuhfeld's table of orthogonal arrays (SAS Institute, TS-723).
_BLOCK_WORDS = {
    3: "aaa cbc cCC aAB",
    5: "aaaaa cABac abAcB cbCCC bBAaC aAbbb bbcBb cacbA",
    7: "aaaaaaa cAAcaaB acAaAcC cCBaAbc cBaAAaC acCACbc aAaBcAB cccCBBc cbCBbBb aCCbBBA aAcbbCb cabbbAB",
}
_HALVES = {"a": "0011", "b": "0101", "c": "0110", "A": "1100", "B": "1010", "C": "1001"}


def _matrix(text: str) -> IntArray:
    return np.array([[int(letter, 12) for letter in word] for word in text.split()], dtype=np.int64)


def stored_scheme(rows: int, levels: int) -> IntArray | None:
    """Return the stored difference scheme with these rows and levels, or None."""
    if rows != 12 or levels not in (3, 4, 12):
        return None
    if levels == 12:
        return np.ascontiguousarray(_matrix(_TWELVE_OVER_TWELVE).T)
    return _matrix(_TWELVE_OVER_THREE if levels == 3 else _TWELVE_OVER_FOUR)


def williamson_rows(order: int) -> IntArray | None:
    """Return the first rows of the four circulants of Williamson's Hadamard matrix of this order, or None."""
    if order != 92:
        return None
    return np.array([[1 if sign == "+" else -1 for sign in word] for word in _WILLIAMSON_23.split()])


def block_columns(runs: int) -> int:
    """Return the number of two-level columns of the stored array besides its column of runs / 4 levels, or 0."""
    return len(_BLOCK_WORDS.get(runs // 4, "").split()) if runs % 4 == 0 else 0


def block_array(runs: int) -> IntArray:
    """Return OA(runs, (runs/4)^1 2^f, 2), the column of runs / 4 levels first; runs is 12, 20 or 28."""
    halves = [[int(x) for letter in word for x in _HALVES[letter]] for word in _BLOCK_WORDS[runs // 4].split()]
    return np.column_stack([np.repeat(np.arange(runs // 4), 4), np.array(halves, dtype=np.int64).T])
