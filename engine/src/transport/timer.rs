//! The local ACK timeout: what the QP's attribute asks for, and more where the peer is slow but alive.

use std::time::Duration;

use crate::time::Time;

/// The shortest local ACK timeout. Shorter ones would run out while an acknowledgement waits for company, or the peer's
/// thread for its turn on a processor; the standard lets a device take up to four times the time asked for.
const SHORTEST: Duration = Duration::from_millis(4);

/// The time asked for by the 5-bit attribute: 4.096 us x 2^t; `None` for 0, which is for ever.
pub(crate) fn local_ack_timeout(attribute: u8) -> Option<Duration> {
    (attribute > 0).then(|| Duration::from_nanos(4096 << attribute.min(31)).max(SHORTEST))
}

/// Measures round trips, by one packet at a time, never one that was sent twice.
#[derive(Default)]
pub(crate) struct RoundTrip {
    /// The sequence number after the packet that is measured, and when it was sent.
    probe: Option<(u64, Time)>,
    /// Smoothed, and its mean deviation, as TCP has them.
    smoothed: Option<(Duration, Duration)>,
}

impl RoundTrip {
    /// A new packet went out that the peer is to answer; `end`: the sequence number that follows it.
    pub fn sent(&mut self, end: u64, now: Time) {
        self.probe.get_or_insert((end, now));
    }

    /// Everything before `to` is acknowledged: gives the round trip, if that ends a measurement.
    pub fn acked(&mut self, to: u64, now: Time) -> Option<Duration> {
        let (_, since) = self.probe.take_if(|&mut (end, _)| end <= to)?;
        let sample = now.since(since);
        self.smoothed = Some(match self.smoothed {
            None => (sample, sample / 2),
            Some((mean, deviation)) => (
                (mean * 7 + sample) / 8,
                (deviation * 3 + mean.abs_diff(sample)) / 4,
            ),
        });
        Some(sample)
    }

    /// Packets are sent again: whose answer comes can't be told.
    pub fn abandon(&mut self) {
        self.probe = None;
    }

    /// How long to wait for an answer: the local ACK timeout, more for a peer known to be slow, and twice as long after
    /// each of the `tries` that were in vain, since round trips of what is sent again can't be measured. Never more than
    /// four times the timeout, which is what the standard lets a device take.
    pub fn patience(&self, timeout: Duration, tries: u8) -> Duration {
        let usual = self
            .smoothed
            .map_or(Duration::ZERO, |(mean, deviation)| mean + deviation * 4);
        (usual.clamp(timeout, timeout * 2) * (1 << tries.min(2))).min(timeout * 4)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    #[test]
    fn times_of_the_attribute() {
        assert_eq!(local_ack_timeout(0), None);
        assert_eq!(local_ack_timeout(1), Some(SHORTEST));
        assert_eq!(local_ack_timeout(14), Some(Duration::from_nanos(4096 << 14)));
    }

    #[test]
    fn waits_longer_for_a_slow_peer() {
        let mut trip = RoundTrip::default();
        assert_eq!(trip.patience(10 * MS, 0), 10 * MS);
        let mut now = Time::ZERO;
        for (sample, patience) in [(1, 10), (5, 10), (30, 20), (30, 20)] {
            trip.sent(1, now);
            trip.sent(2, now + MS);
            now = now + sample * MS;
            assert_eq!(trip.acked(0, now), None);
            assert_eq!(trip.acked(1, now), Some(sample * MS), "of the first packet");
            assert_eq!(trip.acked(2, now), None);
            assert_eq!(trip.patience(10 * MS, 0), patience * MS);
        }
        assert_eq!(
            [0, 1, 2, 7].map(|tries| trip.patience(10 * MS, tries) / 10),
            [2 * MS, 4 * MS, 4 * MS, 4 * MS]
        );
        let fresh = RoundTrip::default();
        assert_eq!(
            [0, 1, 2, 7].map(|tries| fresh.patience(MS, tries)),
            [MS, 2 * MS, 4 * MS, 4 * MS]
        );
        trip.sent(3, now);
        trip.abandon();
        assert_eq!(trip.acked(3, now), None);
    }
}
