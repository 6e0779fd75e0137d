//! Salts by which engines and the index keep tenants' prefixes apart. Whoever could choose a salt could hit another's prefixes, so a
//! client's own never passes: it only divides its tenant's domain further.

use std::fmt::{self, Write as _};

use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;

use crate::config::Secret;

/// Makes one tenant's salts: HMAC-SHA-256 by the gateway's secret over the tenant's name, and over a zero byte and the client's salt where
/// it sends one. No name has a zero byte, so no two tenants share a salt; and without the secret none can be told from a name.
#[derive(Clone)]
pub(crate) struct Salts {
    named: Hmac<Sha256>,
    own: String,
}

impl Salts {
    pub(crate) fn new(secret: &Secret, tenant: &str) -> Self {
        let mut named = Hmac::<Sha256>::new_from_slice(secret.reveal().as_bytes()).expect("any length is a key");
        named.update(tenant.as_bytes());
        let own = hex(named.clone());
        Self { named, own }
    }

    /// The salt of a request whose client sent `salt`.
    pub(crate) fn of(&self, salt: Option<&str>) -> String {
        let Some(salt) = salt else { return self.own.clone() };
        let mut divided = self.named.clone();
        divided.update(&[0]);
        divided.update(salt.as_bytes());
        hex(divided)
    }
}

fn hex(mac: Hmac<Sha256>) -> String {
    let bytes = mac.finalize().into_bytes();
    let mut text = String::with_capacity(2 * bytes.len());
    for byte in bytes {
        write!(text, "{byte:02x}").expect("a string takes it");
    }
    text
}

impl fmt::Debug for Salts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("(salts)")
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_salt_is_the_names_hmac() {
        // RFC 4231, test case 2.
        let salts = Salts::new(&Secret::new("Jefe"), "what do ya want for nothing?");
        assert_eq!(salts.of(None), "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
    }

    proptest! {
        /// Who differs in secret, tenant or own salt has another salt, an empty and a missing one included; who does not has the same.
        #[test]
        fn salts_are_shared_by_nobody_else(
            who in prop::collection::btree_set(("[ab]{1,3}", "[ab]{1,3}", prop::option::of("[ab\0]{0,3}")), 1..12),
        ) {
            let salt = |(secret, tenant, salt): &(String, String, Option<String>)| Salts::new(&Secret::new(secret.as_str()), tenant).of(salt.as_deref());
            let salts: BTreeSet<String> = who.iter().map(salt).collect();
            prop_assert_eq!(salts.len(), who.len());
            prop_assert!(who.iter().all(|who| salts.contains(&salt(who))));
        }
    }
}
