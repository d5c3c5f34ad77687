//! `ferroce link add`: its words, in pairs as iproute2 has them.

use clap::error::ErrorKind;
use clap::{Args, CommandFactory};
use ferroce_engine::control::protocol::{Request, XdpOptions};
use ferroce_engine::link::xdp::port::Zerocopy;

use crate::cli::Ferroce;

const USAGE: &str = "ferroce link add NAME netdev IF [ mode { udp | xdp } ]
           [ queues N ] [ zerocopy { auto | on | off } ] [ chunk { 2048 | 4096 } ] [ programs N ]";

const WORDS: &str = "\
Words after `netdev IF`, in any order:
  mode { udp | xdp }              what carries packets: UDP sockets, which need no privilege (the
                                  default), or AF_XDP sockets, which need a ferroced of root's and
                                  are faster; programs that use a device in XDP mode must trust
                                  one another
 with `mode xdp`:
  queues N                        receive queues to serve; RoCE that arrives on others takes the
                                  slower way by UDP sockets [default: all]
  zerocopy { auto | on | off }    whether the driver reads and writes frames itself [default: auto,
                                  where it can]
  chunk { 2048 | 4096 }           bytes of a frame [default: by the MTU]
  programs N                      programs that can use the device at once, 1 to 251 [default: 32]

A device in XDP mode takes the place of the one that the interface has by itself, if no program
uses that.";

/// Adds a device on a network interface that has none.
#[derive(Args)]
#[command(override_usage = USAGE, after_help = WORDS)]
pub struct Add {
    /// Name of the new device.
    #[arg(value_name = "NAME")]
    name: String,
    /// The word `netdev`.
    #[arg(value_name = "netdev", value_parser = ["netdev"])]
    keyword: String,
    /// The network interface.
    #[arg(value_name = "IF")]
    netdev: String,
    /// What carries its packets, and how.
    #[arg(value_name = "WORD VALUE")]
    words: Vec<String>,
}

impl Add {
    /// The request; ends the process on wrong usage.
    pub fn request(self) -> Request {
        match options(&self.words) {
            Ok(xdp) => Request::LinkAdd {
                name: self.name,
                netdev: self.netdev,
                xdp,
            },
            Err((kind, text)) => Ferroce::command().override_usage(USAGE).error(kind, text).exit(),
        }
    }
}

/// What the words say: `None` is UDP mode.
fn options(words: &[String]) -> Result<Option<XdpOptions>, (ErrorKind, String)> {
    let mut given: Vec<&str> = Vec::new();
    let mut xdp = false;
    let mut options = XdpOptions::default();
    for pair in words.chunks(2) {
        let word = pair[0].as_str();
        let allowed = match word {
            "mode" => "udp, xdp",
            "queues" => "1 to 64",
            "zerocopy" => "auto, on, off",
            "chunk" => "2048, 4096",
            "programs" => "1 to 251",
            _ => {
                let text = format!(
                    "unexpected word '{word}': the words are mode, queues, zerocopy, chunk and programs"
                );
                return Err((ErrorKind::UnknownArgument, text));
            }
        };
        let Some(value) = pair.get(1) else {
            let text =
                format!("a value is required for '{word}' but none was supplied [possible: {allowed}]");
            return Err((ErrorKind::InvalidValue, text));
        };
        if given.contains(&word) {
            let text = format!("the word '{word}' cannot be used multiple times");
            return Err((ErrorKind::ArgumentConflict, text));
        }
        given.push(word);
        let number = |most: u16| value.parse().ok().filter(|number| (1..=most).contains(number));
        let taken = match (word, value.as_str()) {
            ("mode", "udp") => Some(()),
            ("mode", "xdp") => {
                xdp = true;
                Some(())
            }
            ("zerocopy", word) => zerocopy(word).map(|zerocopy| options.zerocopy = zerocopy),
            ("chunk", _) => chunk(value).map(|chunk| options.chunk = Some(chunk)),
            ("queues", _) => number(64).map(|queues| options.queues = Some(queues)),
            ("programs", _) => number(251).map(|programs| options.programs = Some(programs)),
            _ => None,
        };
        if taken.is_none() {
            let text = format!("invalid value '{value}' for '{word}' [possible: {allowed}]");
            return Err((ErrorKind::InvalidValue, text));
        }
    }
    if xdp {
        return Ok(Some(options));
    }
    match given.iter().find(|word| **word != "mode") {
        Some(word) => {
            let text = format!("'{word}' is of XDP mode only: say `mode xdp` as well, or leave it out");
            Err((ErrorKind::ArgumentConflict, text))
        }
        None => Ok(None),
    }
}

fn chunk(word: &str) -> Option<u32> {
    match word {
        "2048" => Some(2048),
        "4096" => Some(4096),
        _ => None,
    }
}

fn zerocopy(word: &str) -> Option<Zerocopy> {
    match word {
        "auto" => Some(Zerocopy::Auto),
        "on" => Some(Zerocopy::On),
        "off" => Some(Zerocopy::Off),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(text: &str) -> Result<Option<XdpOptions>, (ErrorKind, String)> {
        let words: Vec<String> = text.split_whitespace().map(str::to_owned).collect();
        options(&words)
    }

    #[test]
    fn words_come_in_any_order() {
        assert_eq!(parsed(""), Ok(None));
        assert_eq!(parsed("mode udp"), Ok(None));
        assert_eq!(parsed("mode xdp"), Ok(Some(XdpOptions::default())));
        let all = XdpOptions {
            queues: Some(2),
            zerocopy: Zerocopy::Off,
            chunk: Some(4096),
            programs: Some(251),
        };
        for text in [
            "mode xdp queues 2 zerocopy off chunk 4096 programs 251",
            "programs 251 chunk 4096 zerocopy off queues 2 mode xdp",
        ] {
            assert_eq!(parsed(text), Ok(Some(all)), "{text}");
        }
    }

    #[test]
    fn what_is_wrong_is_named() {
        for (text, kind, part) in [
            ("fast", ErrorKind::UnknownArgument, "'fast'"),
            ("mode", ErrorKind::InvalidValue, "'mode'"),
            ("mode tcp", ErrorKind::InvalidValue, "udp, xdp"),
            ("mode xdp queues", ErrorKind::InvalidValue, "'queues'"),
            ("mode xdp queues 0", ErrorKind::InvalidValue, "1 to 64"),
            ("mode xdp queues two", ErrorKind::InvalidValue, "'two'"),
            ("mode xdp programs 252", ErrorKind::InvalidValue, "1 to 251"),
            ("mode xdp chunk 3000", ErrorKind::InvalidValue, "2048, 4096"),
            ("mode xdp zerocopy yes", ErrorKind::InvalidValue, "auto, on, off"),
            ("mode xdp mode xdp", ErrorKind::ArgumentConflict, "multiple"),
            ("queues 2", ErrorKind::ArgumentConflict, "mode xdp"),
            ("mode udp zerocopy on", ErrorKind::ArgumentConflict, "'zerocopy'"),
        ] {
            let (found, said) = parsed(text).expect_err(text);
            assert_eq!(found, kind, "{text}");
            assert!(said.contains(part), "{text}: {said}");
        }
    }
}
