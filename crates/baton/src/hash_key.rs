//! `baton hash-key`: a client's key from stdin, as the line that a gateway's configuration holds of it.

use std::io::{BufRead, Write};

use anyhow::Result;
use baton_gateway::KeyHash;

use crate::cli::BadInput;

/// Reads the first line, so that the key is no argument that other users of the machine could see.
pub(crate) fn run(input: &mut impl BufRead, output: &mut impl Write) -> Result<()> {
    let mut line = String::new();
    input.read_line(&mut line)?;
    let key = line.trim();
    if key.is_empty() {
        return Err(BadInput("no key on stdin; for example: openssl rand -hex 32 | tee key | baton hash-key".to_owned()).into());
    }
    writeln!(output, "{}", KeyHash::of(key.as_bytes()))?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn printed(input: &str) -> Result<String> {
        let mut output = Vec::new();
        run(&mut input.as_bytes(), &mut output)?;
        Ok(String::from_utf8(output)?)
    }

    #[test]
    fn what_is_printed_is_what_a_configuration_takes() {
        let line = printed("abc\n").unwrap();
        assert_eq!(line, "sha256:ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad\n");
        assert_eq!(line.trim().parse(), Ok(KeyHash::of(b"abc")));
    }

    #[test]
    fn no_key_is_a_mistake() {
        assert!(printed("\n").unwrap_err().is::<BadInput>() && printed("").unwrap_err().is::<BadInput>());
    }
}
