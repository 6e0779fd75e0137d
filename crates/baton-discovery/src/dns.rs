//! All addresses of a name.

use std::{collections::BTreeSet, convert::Infallible, io, net::SocketAddr, time::Duration};

use tokio::{net::lookup_host, time::sleep};

use crate::{Answer, Endpoint, Readiness, SourceError};

/// A name whose every A and AAAA record is an engine, as a headless Kubernetes service or a round-robin record has them. It is resolved
/// as this machine resolves names (`/etc/hosts`, search domains); SRV records are not asked for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Dns {
    /// Name to resolve; an address stands for itself.
    pub host: String,
    /// Port of every engine.
    pub port: u16,
    /// Between two looks.
    pub every: Duration,
}

impl Dns {
    /// Resolves the name again and again, and tells each answer. An answer without an address is none: [`SourceError::NoAddress`].
    pub async fn watch<T: Default>(self, tell: impl FnMut(Answer<T>)) -> Infallible {
        self.watch_by(system, tell).await
    }

    async fn watch_by<T: Default, F: Future<Output = io::Result<Vec<SocketAddr>>>>(
        self,
        mut resolve: impl FnMut(String, u16) -> F,
        mut tell: impl FnMut(Answer<T>),
    ) -> Infallible {
        loop {
            let resolved = resolve(self.host.clone(), self.port).await;
            tell(self.answer(resolved));
            sleep(self.every).await;
        }
    }

    fn answer<T: Default>(&self, resolved: io::Result<Vec<SocketAddr>>) -> Answer<T> {
        let addresses = resolved.map_err(|error| SourceError::Unresolved { host: self.host.clone(), error })?;
        // An IPv6 scope is of this machine and no part of a URL.
        let addresses: BTreeSet<SocketAddr> = addresses.into_iter().map(|address| SocketAddr::new(address.ip(), address.port())).collect();
        if addresses.is_empty() {
            return Err(SourceError::NoAddress { host: self.host.clone() });
        }
        Ok(addresses.into_iter().map(endpoint).collect())
    }
}

async fn system(host: String, port: u16) -> io::Result<Vec<SocketAddr>> {
    Ok(lookup_host((host.as_str(), port)).await?.collect())
}

fn endpoint<T: Default>(address: SocketAddr) -> Endpoint<T> {
    Endpoint {
        address: format!("http://{address}"),
        identity: None,
        label: address.to_string(),
        readiness: Readiness::Ready,
        options: T::default(),
    }
}

#[cfg(test)]
mod tests {
    use std::{collections::VecDeque, io::ErrorKind};

    use tokio::{sync::mpsc, time::Instant};

    use super::*;

    fn name() -> Dns {
        Dns { host: "engines.example".to_owned(), port: 8000, every: Duration::from_secs(10) }
    }

    fn addresses(list: &[&str]) -> Vec<SocketAddr> {
        list.iter().map(|address| address.parse().unwrap()).collect()
    }

    fn urls(answer: Answer<()>) -> Result<Vec<String>, String> {
        answer.map(|endpoints| endpoints.into_iter().map(|endpoint| endpoint.address).collect()).map_err(|error| error.to_string())
    }

    #[tokio::test(start_paused = true)]
    async fn every_answer_is_told_at_its_time() {
        let mut answers = VecDeque::from([
            Ok(addresses(&["10.0.0.2:8000", "10.0.0.1:8000", "10.0.0.2:8000"])),
            Err(io::Error::new(ErrorKind::TimedOut, "no resolver")),
            Ok(addresses(&[])),
            Ok(addresses(&["[fd00::1]:8000"])),
        ]);
        let (tell, mut told) = mpsc::unbounded_channel();
        let begun = Instant::now();
        let resolve = |host: String, port: u16| {
            assert_eq!((host.as_str(), port), ("engines.example", 8000));
            let answer = answers.pop_front();
            async {
                match answer {
                    Some(answer) => answer,
                    None => std::future::pending().await,
                }
            }
        };
        let watching = name().watch_by(resolve, move |answer: Answer<()>| tell.send((begun.elapsed(), urls(answer))).unwrap());
        let expected = [
            (0, Ok(vec!["http://10.0.0.1:8000".to_owned(), "http://10.0.0.2:8000".to_owned()])),
            (10, Err("engines.example cannot be resolved: no resolver".to_owned())),
            (20, Err("engines.example has no address".to_owned())),
            (30, Ok(vec!["http://[fd00::1]:8000".to_owned()])),
        ];
        let reading = async {
            for (second, answer) in expected {
                assert_eq!(told.recv().await.unwrap(), (Duration::from_secs(second), answer));
            }
        };
        tokio::select! {
            never = watching => match never {},
            () = reading => {}
        }
    }

    #[tokio::test]
    async fn this_machine_resolves_its_own_name() {
        let (tell, mut told) = mpsc::unbounded_channel();
        let local = Dns { host: "localhost".to_owned(), ..name() };
        let watching = local.watch(move |answer: Answer<()>| tell.send(urls(answer)).unwrap());
        let found = tokio::select! {
            never = watching => match never {},
            found = told.recv() => found.unwrap().unwrap(),
        };
        assert!(found.iter().any(|url| url == "http://127.0.0.1:8000" || url == "http://[::1]:8000"), "{found:?}");
    }
}
