"""For the tests of `watch`: a made-up recording. One draft of three is rejected while another step is under way."""

from ppsd_rt.lab.watch.record import DraftToken, Recording, Verdict

SMALL = Recording(
    "elastic, cpu int8",
    ("draft: layers 1-3, exit head", "verify: layers 4-30"),
    (
        ("draft", 0, 1, 0.0, 1000.0),
        ("draft", 0, 1, 1000.0, 2000.0),
        ("verify", 1, 2, 1000.0, 3000.0),
        ("draft", 0, 1, 2000.0, 2900.0),
        ("dropped draft", 0, 1, 2900.0, 3100.0),
        ("verify", 1, 1, 3200.0, 5000.0),
    ),
    (
        DraftToken(6, " sky", 1000.0, 3000.0, "accepted"),
        DraftToken(7, " <red>", 2000.0, 3000.0, "rejected"),
        DraftToken(8, "\x1b[2J", 2900.0, 3000.0, "dropped"),
    ),
    (
        Verdict(0.0, (("The", "plain"),)),
        Verdict(3000.0, ((" sky", "accepted"), (" is", "corrected")), 1, True),
        Verdict(5000.0, (("\nblue", "plain"),)),
    ),
)
