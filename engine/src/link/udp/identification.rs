//! The IPv4 identification of received packets, which sockets don't tell and the ICRC covers.
//!
//! Ferroce's own sockets send 0, and the index of the segment where the kernel segments. Other senders count, from
//! somewhere: their id is recovered from the ICRC itself, which leaves 16 bits of the check; the ids of a flow then
//! must continue each other, once it has shown that it counts.
#![deny(unsafe_code)]

use std::net::IpAddr;
use std::time::Duration;

use ferroce_wire::icrc::IdRecovery;
use rustc_hash::FxHasher;

/// Flows remembered; others that fall on the same entry replace it.
const FLOWS: usize = 256;
/// Packet lengths whose recovery constants are kept.
const LENGTHS: usize = 32;
/// How many ids in a row that continue each other show that a flow counts.
const COUNTS_AFTER: u8 = 16;
/// How far ahead the next id of a counting flow may be: others share the counter, and packets get lost.
const AHEAD: u32 = 512;
/// How much further for each millisecond since: the counter goes on for others, and Linux adds random steps.
const AHEAD_PER_MS: u128 = 8;
/// How far back: packets change order.
const BEHIND: u16 = 64;

/// What is known of the ids of one flow.
#[derive(Clone, Copy, Default)]
struct Flow {
    /// Hash of source address, source port and destination address.
    key: u64,
    last: u16,
    /// A refused id: if the next one continues it, the counter has jumped.
    refused: Option<u16>,
    /// Ids that continued their predecessor, up to [`COUNTS_AFTER`].
    run: u8,
    /// When the last id came.
    at: Duration,
}

/// Recovers ids, and remembers flows.
pub(super) struct Identification {
    flows: Vec<Flow>,
    lengths: Vec<(u16, IdRecovery)>,
    /// Packets whose id was recovered and accepted.
    pub recovered: u64,
    /// Packets whose id did not continue the flow.
    pub refused: u64,
}

impl Identification {
    pub fn new() -> Identification {
        Identification {
            flows: vec![Flow::default(); FLOWS],
            lengths: vec![(0, IdRecovery::for_total_len(0)); LENGTHS],
            recovered: 0,
            refused: 0,
        }
    }

    /// Whether a packet with the ICRC `received` is good, given the ICRC that it would have with the id `assumed`
    /// and that is another one. The flow is the sender's address and port and the address that it sends to: Linux counts
    /// for each pair of addresses.
    pub fn accepts(
        &mut self,
        flow: (IpAddr, u16, IpAddr),
        total_len: u16,
        assumed: u16,
        received: u32,
        computed: u32,
        now: impl FnOnce() -> Duration,
    ) -> bool {
        let kept = &mut self.lengths[usize::from(total_len / 4) % LENGTHS];
        if kept.0 != total_len {
            *kept = (total_len, IdRecovery::for_total_len(total_len));
        }
        // CRCs are linear: what is recovered is the difference to the id assumed.
        let Some(difference) = kept.1.recover(received, computed) else {
            return false;
        };
        let id = difference ^ assumed;
        if id == 0 {
            return true;
        }
        let key = hash(flow);
        let flow = &mut self.flows[key as usize % FLOWS];
        if flow.key != key {
            *flow = Flow {
                key,
                last: id,
                at: now(),
                ..Flow::default()
            };
        } else if flow.take(id, now()) {
            self.recovered += 1;
            return true;
        } else {
            self.refused += 1;
            return false;
        }
        self.recovered += 1;
        true
    }
}

impl Flow {
    /// Whether `id` is credible as the next one.
    fn take(&mut self, id: u16, now: Duration) -> bool {
        let idle = now.saturating_sub(self.at).as_millis();
        let continues = follows(id, self.last, idle);
        let counts = self.run == COUNTS_AFTER;
        if continues {
            self.run = (self.run + 1).min(COUNTS_AFTER);
        } else if counts && !self.refused.is_some_and(|refused| follows(id, refused, idle)) {
            self.refused = Some(id);
            return false;
        } else if !counts {
            self.run = 0;
        }
        (self.last, self.refused, self.at) = (id, None, now);
        true
    }
}

/// Whether `id` may come after `last`, `idle` milliseconds later.
fn follows(id: u16, last: u16, idle: u128) -> bool {
    let ahead = u128::from(AHEAD) + idle.saturating_mul(AHEAD_PER_MS);
    u128::from(id.wrapping_sub(last)) <= ahead || last.wrapping_sub(id) <= BEHIND
}

fn hash(flow: (IpAddr, u16, IpAddr)) -> u64 {
    use std::hash::{Hash, Hasher};
    let mut hasher = FxHasher::default();
    flow.hash(&mut hasher);
    hasher.finish() | 1
}

#[cfg(test)]
mod tests {
    use super::*;
    use ferroce_wire::icrc::{Icrc, Ipv4Pseudo};

    const LEN: u16 = 1068;

    fn icrc(id: u16, damage: u8) -> u32 {
        let mut icrc = Icrc::ipv4(&Ipv4Pseudo {
            src: [10, 0, 0, 1],
            dst: [10, 0, 0, 2],
            id,
            total_len: LEN,
            dont_fragment: true,
            src_port: 0xc000,
        });
        icrc.update_packet(&vec![damage; usize::from(LEN) - 32]);
        icrc.finish()
    }

    struct Peer(Identification, Duration);

    impl Peer {
        fn new() -> Peer {
            Peer(Identification::new(), Duration::from_secs(1))
        }

        fn sends(&mut self, id: u16) -> bool {
            self.sends_to([10, 0, 0, 2], id)
        }

        fn sends_to(&mut self, dest: [u8; 4], id: u16) -> bool {
            let flow = (IpAddr::from([10, 0, 0, 1]), 0xc000, IpAddr::from(dest));
            self.0.accepts(flow, LEN, 3, icrc(id, 0), icrc(3, 0), || self.1)
        }
    }

    #[test]
    fn zero_is_right_at_any_time() {
        let mut peer = Peer::new();
        assert!((0..100).all(|_| peer.sends(0)));
        assert_eq!(peer.0.recovered, 0);
    }

    #[test]
    fn random_ids_are_accepted_as_long_as_none_continue() {
        let mut peer = Peer::new();
        let mut id = 12345u16;
        for _ in 0..1000 {
            id = id.wrapping_mul(25173).wrapping_add(13849) | 0x8000;
            assert!(peer.sends(id));
        }
        assert_eq!(peer.0.recovered, 1000);
    }

    #[test]
    fn a_counter_with_gaps_is_accepted_and_a_jump_once_refused() {
        let mut peer = Peer::new();
        let mut id = 65_000u16;
        for gap in (1..=20).cycle().take(500) {
            id = id.wrapping_add(gap).max(1);
            assert!(peer.sends(id));
        }
        assert!(!peer.sends(id.wrapping_add(20_000)));
        assert!(peer.sends(id.wrapping_add(1)));
        assert!(!peer.sends(id.wrapping_add(20_000)));
        assert!(peer.sends(id.wrapping_add(20_001)));
        assert!(peer.sends(id.wrapping_add(20_002)));
        assert_eq!(peer.0.refused, 2);
        // After ten seconds the counter may be anywhere.
        peer.1 += Duration::from_secs(10);
        assert!(peer.sends(id.wrapping_add(60_000)));
    }

    #[test]
    fn each_destination_has_a_counter() {
        let mut peer = Peer::new();
        for id in 1..=100 {
            assert!(peer.sends(id));
            assert!(peer.sends_to([239, 7, 7, 1], 30_000 + id));
        }
        assert_eq!(peer.0.refused, 0);
    }

    #[test]
    fn damage_is_refused() {
        let mut identification = Identification::new();
        let flow = (IpAddr::from([10, 0, 0, 1]), 0xc000, IpAddr::from([10, 0, 0, 2]));
        for damage in 1..=255 {
            let now = || Duration::ZERO;
            assert!(!identification.accepts(flow, LEN, 0, icrc(77, 0), icrc(0, damage), now));
        }
    }
}
