//! Where the files of this installation are.

use std::path::{Path, PathBuf};

use super::CliError;

/// Variable that names a directory with the provider files and the shim.
const VARIABLE: &str = "FERROCE_LIBDIR";
/// File name of the path shim.
const SHIM: &str = "libferroce_shim.so";
/// File name of the provider without the suffix that libibverbs appends for its private ABI.
const PROVIDER: &str = "libferroce";

/// Files that a program needs to find Ferroce.
#[derive(Debug, PartialEq, Eq)]
pub struct Installation {
    /// The path shim, for LD_PRELOAD.
    pub shim: PathBuf,
    /// The provider without suffix, for RDMAV_DRIVERS.
    pub provider: PathBuf,
}

impl Installation {
    /// Finds the files beside this program: in the build tree, or where `make install` puts them.
    pub fn find() -> Result<Self, CliError> {
        let missing = |what: &str| {
            CliError::Installation(format!(
                "{what} of this installation is missing: install Ferroce anew, or set {VARIABLE} to the directory that has it"
            ))
        };
        let directories = match std::env::var_os(VARIABLE) {
            Some(directory) => vec![std::path::absolute(directory)?],
            None => candidates(&own_directory()?),
        };
        let shim = directories.iter().map(|it| it.join(SHIM)).find(|it| it.exists());
        let shim = shim.ok_or_else(|| missing("the path shim (libferroce_shim.so)"))?;
        let provider = directories
            .iter()
            .find(|it| has_provider(it))
            .map(|it| it.join(PROVIDER));
        let provider = provider.ok_or_else(|| missing("the verbs provider (libferroce-rdmav*.so)"))?;
        for path in [&shim, &provider] {
            // The dynamic linker and libibverbs split their lists there, and know no escape.
            if path
                .as_os_str()
                .as_encoded_bytes()
                .iter()
                .any(|byte| b" :;".contains(byte))
            {
                return Err(CliError::Installation(format!(
                    "{} can't be preloaded because of the blank, colon or semicolon in its name: install Ferroce elsewhere",
                    path.display()
                )));
            }
        }
        Ok(Self { shim, provider })
    }

    /// The daemon's program beside this one, else the one in PATH.
    pub fn daemon() -> PathBuf {
        own_directory()
            .map(|directory| directory.join("ferroced"))
            .ok()
            .filter(|it| it.exists())
            .unwrap_or_else(|| {
                let sbin = own_directory()
                    .map(|directory| directory.join("../sbin/ferroced"))
                    .ok();
                sbin.filter(|it| it.exists())
                    .unwrap_or_else(|| PathBuf::from("ferroced"))
            })
    }
}

fn own_directory() -> std::io::Result<PathBuf> {
    let program = std::env::current_exe()?;
    Ok(program.parent().map(Path::to_owned).unwrap_or_default())
}

/// Directories that may hold libraries of a program in `directory`.
fn candidates(directory: &Path) -> Vec<PathBuf> {
    let mut candidates = vec![directory.join("lib")];
    if let Some(prefix) = directory.parent() {
        candidates.push(prefix.join("lib/ferroce"));
        candidates.push(
            prefix
                .join("lib")
                .join(format!("{}-linux-gnu", std::env::consts::ARCH))
                .join("libibverbs"),
        );
        candidates.push(prefix.join("lib64/libibverbs"));
        candidates.push(prefix.join("lib/libibverbs"));
    }
    candidates
}

fn has_provider(directory: &Path) -> bool {
    let start = format!("{PROVIDER}-rdmav");
    let entries = std::fs::read_dir(directory).into_iter().flatten().flatten();
    entries
        .into_iter()
        .any(|entry| entry.file_name().to_string_lossy().starts_with(&start))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn build_tree_comes_first_then_the_prefix() {
        let found = candidates(Path::new("/opt/x/bin"));
        assert_eq!(found[0], Path::new("/opt/x/bin/lib"));
        assert_eq!(found[1], Path::new("/opt/x/lib/ferroce"));
        assert!(found[2].starts_with("/opt/x/lib") && found[2].ends_with("libibverbs"));
    }
}
