//! A small seeded random generator for simulation and fault injection. Not for keys: see the device's own generator.
#![deny(unsafe_code)]

use std::fmt;
use std::str::FromStr;

/// SplitMix64 (Steele, Lea, Flood 2014): a 64-bit counter and a mixing function; equal seeds give equal sequences.
#[derive(Clone, Debug)]
pub struct Prng(u64);

impl Prng {
    /// The generator of this seed.
    pub fn new(seed: u64) -> Prng {
        Prng(seed)
    }

    /// A generator of its own for a part of the whole, so that one part's use does not shift the others' sequences.
    pub fn fork(&mut self) -> Prng {
        Prng(self.next_u64())
    }

    /// The next 64 bits.
    pub fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number from 0 to `bound - 1`; 0 if `bound` is 0.
    pub fn below(&mut self, bound: u64) -> u64 {
        ((u128::from(self.next_u64()) * u128::from(bound)) >> 64) as u64
    }

    /// A number from `low` to `high`, both included.
    pub fn between(&mut self, low: u64, high: u64) -> u64 {
        low + self.below(high.saturating_sub(low).saturating_add(1))
    }

    /// Whether something of probability `p` happens this time.
    pub fn chance(&mut self, p: Probability) -> bool {
        p.0 > 0 && self.below(u64::from(Probability::ONE.0)) < u64::from(p.0)
    }

    /// One of `items`; `None` if there are none.
    pub fn pick<'a, T>(&mut self, items: &'a [T]) -> Option<&'a T> {
        items.get(self.below(items.len() as u64) as usize)
    }
}

/// A probability, in millionths, so that it is exact and orders the same everywhere.
#[derive(Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Probability(u32);

impl Probability {
    /// Never.
    pub const ZERO: Probability = Probability(0);
    /// Always.
    pub const ONE: Probability = Probability(1_000_000);

    /// `n` in a million; more than a million stands for always.
    pub const fn per_million(n: u32) -> Probability {
        Probability(if n > 1_000_000 { 1_000_000 } else { n })
    }

    /// `n` in a hundred.
    pub const fn percent(n: u32) -> Probability {
        Probability::per_million(n.saturating_mul(10_000))
    }

    /// In millionths.
    pub const fn as_millionths(self) -> u32 {
        self.0
    }
}

impl fmt::Debug for Probability {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl fmt::Display for Probability {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", f64::from(self.0) / 1e6)
    }
}

impl FromStr for Probability {
    type Err = String;

    /// Reads a decimal fraction from 0 to 1.
    fn from_str(s: &str) -> Result<Probability, String> {
        match s.parse::<f64>() {
            Ok(p) if (0.0..=1.0).contains(&p) => Ok(Probability((p * 1e6).round() as u32)),
            _ => Err(format!("'{s}' is not a probability: give a number from 0 to 1")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_sequence_is_that_of_the_published_algorithm() {
        let mut prng = Prng::new(1_234_567);
        let expected = [
            6_457_827_717_110_365_317,
            3_203_168_211_198_807_973,
            9_817_491_932_198_370_423,
        ];
        assert_eq!([prng.next_u64(), prng.next_u64(), prng.next_u64()], expected);
    }

    #[test]
    fn bounds_hold_and_are_reached() {
        let mut prng = Prng::new(1);
        let mut seen = [false; 5];
        for _ in 0..1000 {
            seen[prng.below(5) as usize] = true;
            assert!((3..=4).contains(&prng.between(3, 4)));
        }
        assert_eq!(seen, [true; 5]);
        assert_eq!(prng.below(0), 0);
        assert_eq!(prng.pick::<u8>(&[]), None);
    }

    #[test]
    fn chances_follow_their_probability() {
        let mut prng = Prng::new(2);
        let hits = (0..100_000)
            .filter(|_| prng.chance(Probability::percent(10)))
            .count();
        assert!((9_000..11_000).contains(&hits), "{hits}");
        assert!(!prng.chance(Probability::ZERO) && prng.chance(Probability::ONE));
    }

    #[test]
    fn probabilities_read_and_print() {
        assert_eq!("0.01".parse(), Ok(Probability::percent(1)));
        assert_eq!(Probability::percent(1).to_string(), "0.01");
        for bad in ["", "x", "-0.1", "1.01", "NaN"] {
            assert!(bad.parse::<Probability>().is_err(), "{bad}");
        }
    }
}
