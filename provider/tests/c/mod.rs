//! Comparing numbers of this crate with those of the installed C headers.

use std::fmt::Write as _;
use std::process::Command;

/// One number that the C program and this crate must agree on.
pub struct Check {
    /// In C.
    pub expression: String,
    /// Its value here.
    pub ours: usize,
}

/// Lists sizes of structures and offsets of their members; `rust = c` where the names differ.
macro_rules! checks {
    ($($structure:ident $(($size:ident))? { $($member:ident $(= $name:literal)?),* $(,)? })*) => {{
        let mut checks = Vec::new();
        $(
            let name = checks!(@structure $structure);
            $(
                let member = checks!(@name $member $($name)?);
                checks.push(Check {
                    expression: format!("offsetof(struct {name}, {member})"),
                    ours: offset_of!($structure, $member),
                });
            )*
            if !checks!(@grown $($size)?) {
                checks.push(Check { expression: format!("sizeof(struct {name})"), ours: size_of::<$structure>() });
            }
        )*
        checks
    }};
    (@structure Sge) => { "ibv_sge" };
    (@structure $structure:ident) => { stringify!($structure) };
    (@name $member:ident) => { stringify!($member) };
    (@name $member:ident $name:literal) => { $name };
    (@grown) => { false };
    (@grown grown) => { true };
}
pub(crate) use checks;

/// Compiles and runs the C program `name` that prints the value of each expression on its own line.
pub fn ask_c(name: &str, header: &str, expressions: &[&str]) -> Vec<usize> {
    let mut source =
        format!("#include <stdio.h>\n#include <stddef.h>\n#include <{header}>\nint main(void) {{\n");
    for expression in expressions {
        writeln!(source, "printf(\"%zu\\n\", (size_t)({expression}));").unwrap();
    }
    source.push_str("return 0; }\n");
    let base = std::path::Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    let file = base.with_extension("c");
    std::fs::write(&file, source).unwrap();
    let compiled = Command::new("cc").arg("-o").arg(&base).arg(&file).status();
    assert!(
        compiled.is_ok_and(|status| status.success()),
        "this test needs a C compiler and {header} (Debian: gcc, libibverbs-dev)"
    );
    let output = Command::new(&base).output().unwrap();
    std::fs::remove_file(&base).unwrap();
    std::fs::remove_file(&file).unwrap();
    String::from_utf8(output.stdout)
        .unwrap()
        .lines()
        .map(|line| line.parse().unwrap())
        .collect()
}

/// Compares them all.
pub fn compare(name: &str, header: &str, checks: &[Check]) {
    let expressions: Vec<_> = checks.iter().map(|check| check.expression.as_str()).collect();
    let theirs = ask_c(name, header, &expressions);
    assert_eq!(theirs.len(), checks.len());
    let wrong: Vec<_> = checks
        .iter()
        .zip(theirs)
        .filter(|(check, theirs)| check.ours != *theirs)
        .map(|(check, theirs)| format!("{}: {theirs}, here {}", check.expression, check.ours))
        .collect();
    assert!(wrong.is_empty(), "{wrong:#?}");
}
