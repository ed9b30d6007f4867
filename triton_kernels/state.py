"""Where a pass and an answer stand: int32 words in device memory, read by every kernel.

Each pass (the early layers', the exit head's, each verification stage's) has a set of these words of its own, and so
has the answer. A captured graph is launched again with other rows at another place; nothing but these words (and the
tokens) changes.
"""

# Of a pass and of the answer.
ROWS = 0  # rows in the pass, 0..16; 0: the pass does nothing
START = 1  # position of the first row; the answer's: of the last committed token
EPOCH = 2  # raised at every rejection

# Of a pass.
KNOWN = 3  # the answer's START when the pass began

# Of a verification stage's pass: counted from the answer's beginning.
POSTED = 4  # passes handed to the next stage
FETCHED = 5  # passes taken from the stage before
TAKEN = 6  # rows at positions below this have been taken by the first stage
MAIL_SLOTS = 8  # passes that may be between two stages
MAIL_CHOICES = 16  # of a pass in the mail of a verdict on another device: the choices [16]

# Of the answer.
TOKEN = 3  # the last committed token, which begins the next pass
ACCEPTED = 4  # draft tokens accepted by the last verdict
COMMITTED = 5  # tokens committed by the last verdict
DRAFTED = 6  # tokens, committed or drafted, stand at positions below this
LOCK = 7  # 1 while one of the kernels of verdict.py changes the answer's words
SEQUENCE = 8  # verdicts so far, void ones too: the number of the last record in the ring
DRAWN = 9  # draft steps so far: the number of the last record in the ring of draft tokens

# Of the answer, set by the host.
MOST = 10  # draft tokens that a pass takes at most; the row of the last committed token comes on top
LOOKAHEAD = 11  # draft tokens that there may be beyond the committed text
LIMIT = 12  # rows stand at positions below this, and so do draft tokens
REPORT = 13  # other than 0: draft steps too leave records for the host
ORACLE_END = 14  # draft tokens at positions below this are an oracle's, for benchmarks; 0: none
ORACLE = 15  # the bits of the oracle's acceptance, float32
ORACLE_SEED = 16  # and the next word: its seed
COPIES = 18  # other than 0: draft steps take what the host offers

WORDS = 32

MAX_ROWS = 16  # the columns of a matrix instruction: one row costs what sixteen cost

# A verdict's record in the ring for the host, int32.
RECORD_SEQUENCE = 0  # written last
RECORD_EPOCH = 1  # of the pass
RECORD_POSITION = 2  # of the first token that the pass could commit
RECORD_ROWS = 3
RECORD_ACCEPTED = 4
RECORD_COMMITTED = 5  # 0: the pass was void
RECORD_JUDGED = 6  # draft tokens compared, up to the first that was wrong
RECORD_DRAFTED = 7  # the answer's DRAFTED before the verdict
RECORD_COPIED = 8  # draft tokens that the pass saw and that were offered by the host
RECORD_IDS = 16  # committed ids [16]
RECORD_DRAFTS = 32  # judged ids [16]
RECORD_CONFIDENCES = 48  # their confidences, bits of float32 [16]
RECORD_COPIES = 64  # what the host said of them [16]; 0: drawn by the exit head
RING_WORDS = 80

# What the host offers to draft, int32 in its memory: it writes there at any time, a word at a time.
OFFER_POSITION = 0  # of the first token
OFFER_COUNT = 1
OFFER_MOST = 2  # draft tokens that there may be beyond the committed text
OFFER_TOKENS = 16  # [16]
OFFER_CHANCES = 32  # bits of float32 [16]
OFFER_COPIES = 48  # what they are copied after, for the records [16]
OFFER_WORDS = 64

# A draft step's record.
DRAFT_SEQUENCE = 0  # written last
DRAFT_EPOCH = 1
DRAFT_POSITION = 2  # of the token; -1: none was drawn
DRAFT_TOKEN = 3
DRAFT_CONFIDENCE = 4  # bits of float32
DRAFT_WORDS = 8
