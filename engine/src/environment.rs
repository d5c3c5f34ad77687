//! Variables of the environment that change what Ferroce does.

use std::ffi::OsString;

/// A variable that is set and not empty; none in a program that has more rights than who started it (set-uid, file
/// capabilities): there the environment must not choose what is written, or how memory is laid out.
pub fn variable(name: &str) -> Option<OsString> {
    // SAFETY: reads a constant of the process.
    let secure = unsafe { libc::getauxval(libc::AT_SECURE) } != 0;
    heeded(secure, std::env::var_os(name))
}

fn heeded(secure: bool, value: Option<OsString>) -> Option<OsString> {
    value.filter(|value| !secure && !value.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_with_more_rights_than_its_user_heeds_nothing() {
        let value = || Some(OsString::from("x"));
        assert_eq!(heeded(false, value()), value());
        assert_eq!(heeded(true, value()), None);
        assert_eq!(heeded(false, Some(OsString::new())), None);
        assert_eq!(variable("PATH"), std::env::var_os("PATH"));
    }
}
