//! Plans: what QPs live through. They are made from a seed, and simplified when they fail.

use std::time::Duration;

use ferroce_engine::link::fault::FaultRates;
use ferroce_engine::link::random::{Prng, Probability};
use ferroce_engine::link::sim::Conditions;

use super::{LIVES, OPS, SLOT};

/// Everything that a run depends on.
#[derive(Clone, Debug)]
pub struct Plan {
    pub seed: u64,
    pub mtu: u32,
    pub conditions: [Conditions; 2],
    /// By pair of QPs, what they live through.
    pub pairs: Vec<Vec<Life>>,
}

/// What a pair of QPs does from RESET to RESET.
#[derive(Clone, Debug)]
pub struct Life {
    pub psn: [u32; 2],
    /// By node.
    pub ops: [Vec<Op>; 2],
    pub fate: Fate,
    /// The node that it happens at.
    pub side: usize,
    /// When, and how much later at the other node, in microseconds.
    pub at: u64,
    pub gap: u64,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Fate {
    /// Both do all their work.
    Done,
    Reset,
    Destroy,
    Error,
    /// The send queue drains, and goes on `gap` later.
    Drain,
    /// What the peer names is deregistered.
    Dereg,
}

/// An operation, and when it is posted.
#[derive(Clone, Copy, Debug)]
pub struct Op {
    pub kind: OpKind,
    pub at: u64,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum OpKind {
    Send(usize),
    Write,
    Read,
    Add,
}

/// Sums over runs.
#[derive(Clone, Copy, Debug, Default)]
pub struct Sums {
    /// Lives that something happened to while sends were outstanding: by reset, destruction, ERR, drain, deregistration.
    pub interrupted: [u64; 5],
    /// Lives that began while packets were under way.
    pub flying: u64,
    /// Sends that were not begun when the queue had drained.
    pub held_back: u64,
    /// Operations that met deregistered memory.
    pub refused: u64,
    /// Additions that were known to be done.
    pub added: u64,
}

impl Sums {
    /// Adds another's.
    pub fn add(&mut self, other: &Sums) {
        for (sum, n) in self.interrupted.iter_mut().zip(other.interrupted) {
            *sum += n;
        }
        self.flying += other.flying;
        self.held_back += other.held_back;
        self.refused += other.refused;
        self.added += other.added;
    }
}

impl Plan {
    /// The plan of a seed.
    pub fn new(seed: u64) -> Plan {
        let mut rng = Prng::new(seed ^ 0x11fe);
        let r = &mut rng;
        let mtu = r.between(1, 3) as u32;
        let conditions = [(); 2].map(|()| {
            let mut rate = || Probability::per_million(r.below(30_000) as u32 * (r.below(3) as u32).min(1));
            let rates = FaultRates {
                loss: rate(),
                duplicate: rate(),
                reorder: rate(),
                corrupt: rate(),
            };
            Conditions {
                rates,
                burst: Probability::ZERO,
                burst_length: 2,
                delay: Duration::from_nanos(r.between(500, 200_000)),
                jitter: Duration::from_nanos(r.below(50_000)),
                reorder_by: Duration::from_nanos(r.between(1_000, 500_000)),
                blackout: None,
            }
        });
        let pairs = (0..r.between(1, 3)).map(|_| {
            let (first, step) = (
                r.next_u64() as u32,
                0x30_0000 * if r.below(2) == 0 { 1 } else { 5 },
            );
            let lives = 0..r.between(2, LIVES as u64) as u32;
            lives.map(|n| life(r, first.wrapping_add(n * step))).collect()
        });
        let pairs = pairs.collect();
        Plan {
            seed,
            mtu,
            conditions,
            pairs,
        }
    }

    /// Plans that are a little simpler.
    pub fn simpler(&self) -> Vec<Plan> {
        let mut out = Vec::new();
        let mut change = |f: &dyn Fn(&mut Plan)| {
            let mut plan = self.clone();
            f(&mut plan);
            out.push(plan);
        };
        for side in 0..2 {
            if self.conditions[side].rates != FaultRates::default() {
                change(&|plan| plan.conditions[side].rates = FaultRates::default());
            }
        }
        for (p, lives) in self.pairs.iter().enumerate() {
            if self.pairs.len() > 1 {
                change(&|plan| drop(plan.pairs.remove(p)));
            }
            for (l, life) in lives.iter().enumerate() {
                if lives.len() > 1 {
                    change(&|plan| drop(plan.pairs[p].remove(l)));
                }
                for side in 0..2 {
                    for op in (0..life.ops[side].len()).rev() {
                        change(&|plan| _ = plan.pairs[p][l].ops[side].remove(op));
                    }
                }
            }
        }
        out
    }
}

fn life(r: &mut Prng, psn: u32) -> Life {
    let ops = [(); 2].map(|()| {
        let count = r.below(OPS as u64 + 1);
        let op = |_| {
            let kind = match r.below(5) {
                0 | 1 => OpKind::Send(r.below(SLOT as u64) as usize),
                2 => OpKind::Write,
                3 => OpKind::Read,
                _ => OpKind::Add,
            };
            Op {
                kind,
                at: r.below(2) * r.below(400),
            }
        };
        (0..count).map(op).collect()
    });
    use Fate::*;
    Life {
        psn: [psn & 0xff_ffff, (psn ^ 0x5a) & 0xff_ffff],
        ops,
        fate: *r
            .pick(&[Done, Reset, Reset, Destroy, Error, Drain, Drain, Dereg])
            .unwrap_or(&Done),
        side: r.below(2) as usize,
        at: r.below(600),
        gap: r.below(2) * r.below(300),
    }
}
