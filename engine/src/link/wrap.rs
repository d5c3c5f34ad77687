//! The wrappers that the environment asks for: `FERROCE_FAULT` injects faults, `FERROCE_PCAP` captures packets.
#![deny(unsafe_code)]

use super::Link;
use super::fault::{FaultConfig, FaultInjector};
use super::pcap::PcapTap;
use crate::environment;

/// Wraps a link as `FERROCE_FAULT` (see [`FaultConfig`]) and `FERROCE_PCAP` (a file name, in which `{pid}` stands for
/// the process id) say. The capture shows the wire: received packets before faults befall them, sent ones after.
///
/// # Errors
/// One line that says which variable is wrong, and how.
pub fn from_env(link: Box<dyn Link>) -> Result<Box<dyn Link>, String> {
    let get = |name| environment::variable(name).and_then(|value| value.into_string().ok());
    wrap(
        link,
        get("FERROCE_FAULT").as_deref(),
        get("FERROCE_PCAP").as_deref(),
    )
}

fn wrap(mut link: Box<dyn Link>, fault: Option<&str>, pcap: Option<&str>) -> Result<Box<dyn Link>, String> {
    if let Some(name) = pcap {
        let tap =
            PcapTap::create(link, name).map_err(|e| format!("FERROCE_PCAP: can't write {name}: {e}"))?;
        link = Box::new(tap);
    }
    if let Some(text) = fault {
        let config: FaultConfig = text.parse().map_err(|e| format!("FERROCE_FAULT: {e}"))?;
        link = Box::new(FaultInjector::new(link, config));
    }
    Ok(link)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::link::sim::{NodeConfig, SimNetwork};

    fn link() -> Box<dyn Link> {
        Box::new(SimNetwork::new(1).attach(NodeConfig::new("10.0.0.1".parse().unwrap(), 1)))
    }

    fn counters(link: &dyn Link) -> Vec<&'static str> {
        let mut names = Vec::new();
        link.counters(&mut |name, _| names.push(name));
        names
    }

    #[test]
    fn only_what_is_asked_for_is_wrapped() {
        let plain = wrap(link(), None, None).unwrap();
        assert!(
            !counters(&*plain)
                .iter()
                .any(|name| name.starts_with("fault") || *name == "captured")
        );
        let file = std::env::temp_dir().join("ferroce-wrap-test-{pid}.pcap");
        let both = wrap(link(), Some("loss=0.1"), file.to_str()).unwrap();
        let names = counters(&*both);
        assert!(names.contains(&"fault_lost") && names.contains(&"captured"));
        let made = file
            .to_str()
            .unwrap()
            .replace("{pid}", &std::process::id().to_string());
        drop(both);
        assert_eq!(
            std::fs::read(&made).unwrap().len(),
            24,
            "the header of a pcap file"
        );
        std::fs::remove_file(made).unwrap();
    }

    #[test]
    fn mistakes_name_their_variable() {
        let error = |fault, pcap| wrap(link(), fault, pcap).err().unwrap();
        assert!(error(Some("los=1"), None).starts_with("FERROCE_FAULT: 'los'"));
        assert!(
            error(None, Some("/nowhere/x.pcap")).starts_with("FERROCE_PCAP: can't write /nowhere/x.pcap")
        );
    }
}
