"""What the tests of the loop share: schedules of every kind."""

from hypothesis import strategies as st

from ppsd_rt.schedule import MAX_CHUNK, PLAIN, Schedule
from ppsd_rt.stop_rules import BetaThompson, CalibratedThompson, ConfidenceThreshold, FixedLength

stop_rules = st.one_of(
    st.just(FixedLength()),
    st.floats(0.01, 0.99).map(ConfidenceThreshold),
    st.floats(0.5, 1.0).map(BetaThompson),
    st.builds(CalibratedThompson, st.integers(1, 12), st.floats(0.5, 8), st.floats(0.5, 1)),
)
schedules = st.one_of(
    st.just(PLAIN),
    st.builds(
        lambda chunk, first, ahead, overlap, rule: Schedule(min(first, chunk), chunk, max(ahead, chunk), overlap, rule),
        st.integers(1, MAX_CHUNK),
        st.integers(0, MAX_CHUNK),
        st.integers(1, 20),
        st.booleans(),
        stop_rules,
    ),
)
