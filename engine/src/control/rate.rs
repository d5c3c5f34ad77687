//! How fast a port is, in InfiniBand's terms: lanes of a width, each of a speed.

use super::DeviceInfo;

/// Width and speed of a port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rate {
    /// Lanes.
    lanes: u8,
    /// Speed of a lane.
    speed: Speed,
}

/// Speed of a lane, with the number of `active_speed` in `struct ibv_port_attr`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
enum Speed {
    Sdr = 1,
    Ddr = 2,
    Fdr10 = 8,
    Edr = 32,
    Hdr = 64,
    Ndr = 128,
}

impl Speed {
    /// Name, and units of 100 Mbit/s.
    fn describe(self) -> (&'static str, u32) {
        match self {
            Speed::Sdr => ("SDR", 25),
            Speed::Ddr => ("DDR", 50),
            Speed::Fdr10 => ("FDR10", 100),
            Speed::Edr => ("EDR", 250),
            Speed::Hdr => ("HDR", 500),
            Speed::Ndr => ("NDR", 1000),
        }
    }
}

/// Rates by the Mbit/s of an interface that each is enough for.
const RATES: [(u32, u8, Speed); 9] = [
    (1_000, 1, Speed::Sdr),
    (10_000, 1, Speed::Fdr10),
    (20_000, 4, Speed::Ddr),
    (25_000, 1, Speed::Edr),
    (40_000, 4, Speed::Fdr10),
    (50_000, 2, Speed::Edr),
    (100_000, 4, Speed::Edr),
    (200_000, 4, Speed::Hdr),
    (400_000, 4, Speed::Ndr),
];

/// What stands for the speed of loopback, in Mbit/s: it has none of its own.
const LOOPBACK: u32 = 100_000;

impl DeviceInfo {
    /// The rate of the port: the lowest that is enough for the interface, as Linux chooses it; 1X SDR where the
    /// interface does not tell its speed.
    pub fn rate(&self) -> Rate {
        let mbits = if self.lo { LOOPBACK } else { self.speed };
        let enough = RATES.iter().find(|(most, ..)| mbits <= *most);
        let (_, lanes, speed) = *enough.unwrap_or(&RATES[RATES.len() - 1]);
        Rate { lanes, speed }
    }
}

impl Rate {
    /// `active_width` of `struct ibv_port_attr`.
    pub fn width_code(self) -> u8 {
        match self.lanes {
            1 => 1,
            2 => 16,
            _ => 2, // 4X
        }
    }

    /// `active_speed` of `struct ibv_port_attr`.
    pub fn speed_code(self) -> u8 {
        self.speed as u8
    }

    /// In units of 100 Mbit/s.
    pub fn hundreds(self) -> u32 {
        u32::from(self.lanes) * self.speed.describe().1
    }
}

impl std::fmt::Display for Rate {
    /// As sysfs has it: `100 Gb/sec (4X EDR)`.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let whole = self.hundreds() / 10;
        let half = if self.hundreds().is_multiple_of(10) {
            ""
        } else {
            ".5"
        };
        write!(
            f,
            "{whole}{half} Gb/sec ({}X {})",
            self.lanes,
            self.speed.describe().0
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_lowest_that_is_enough() {
        let rate = |speed, lo| {
            let info = DeviceInfo {
                speed,
                lo,
                ..DeviceInfo::default()
            };
            info.rate()
        };
        for (mbits, text, codes) in [
            (0, "2.5 Gb/sec (1X SDR)", (1, 1)),
            (1_000, "2.5 Gb/sec (1X SDR)", (1, 1)),
            (10_000, "10 Gb/sec (1X FDR10)", (1, 8)),
            (25_000, "25 Gb/sec (1X EDR)", (1, 32)),
            (50_000, "50 Gb/sec (2X EDR)", (16, 32)),
            (100_000, "100 Gb/sec (4X EDR)", (2, 32)),
            (400_000, "400 Gb/sec (4X NDR)", (2, 128)),
        ] {
            let rate = rate(mbits, false);
            assert_eq!(rate.to_string(), text);
            assert_eq!((rate.width_code(), rate.speed_code()), codes);
            assert!(rate.hundreds() * 100 >= mbits);
        }
        assert_eq!(rate(0, true), rate(100_000, false));
    }
}
