"""Where a pass stands: a few int32 in device memory, read by every kernel.

Each pass has these words of its own, and so has the answer; the last three matter for the answer alone (verdict.py).
A captured graph is launched again with other rows at another place; nothing but these words (and the tokens) changes.
"""

ROWS = 0  # rows in the pass, 0..16; 0: the pass does nothing
START = 1  # position of the first row
EPOCH = 2  # raised at every rejection
TOKEN = 3  # the last committed token, which begins the next pass
ACCEPTED = 4  # draft tokens accepted by the last verdict
COMMITTED = 5  # tokens committed by the last verdict
DRAFTED = 6  # draft tokens stand at positions below this
WORDS = 8

MAX_ROWS = 16  # the columns of a matrix instruction: one row costs what sixteen cost
