//! A list of engines in a file.

use std::{
    convert::Infallible,
    fs,
    io::{self, Read as _},
    path::PathBuf,
    time::Duration,
};

use tokio::{task::spawn_blocking, time::sleep};

use crate::{Answer, Endpoint, SourceError};

/// Largest file: some 10,000 engines.
const BYTES_MAX: usize = 4 << 20;

/// A file that lists engines. It is read again and again, not watched through the kernel: a file on NFS, or one that Kubernetes mounts from
/// a `ConfigMap` and changes by a symbolic link two folders above, gives no events of its own, and reading a small file costs nothing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct File {
    pub path: PathBuf,
    /// Between two looks.
    pub every: Duration,
}

impl File {
    /// Reads the file again and again, and tells what `parse` makes of it when it has changed. A change counts once two looks have found
    /// it, so that a file which is being written is not taken for a shorter one. `parse` says what is wrong in words.
    pub async fn watch<T>(self, parse: impl Fn(&str) -> Result<Vec<Endpoint<T>>, String>, mut tell: impl FnMut(Answer<T>)) -> Infallible {
        let mut taken: Option<String> = None;
        let mut last: Option<String> = None;
        loop {
            match self.read().await {
                Ok(text) => {
                    let seen_before = taken.is_none() || last.as_ref() == Some(&text);
                    if seen_before && taken.as_ref() != Some(&text) {
                        tell(parse(&text).map_err(|why| SourceError::Malformed { path: self.path.clone(), why }));
                        taken = Some(text.clone());
                    }
                    last = Some(text);
                }
                Err(error) => {
                    // What is read next is told, even if it is what it was: the source is well again.
                    (taken, last) = (None, None);
                    tell(Err(error));
                }
            }
            sleep(self.every).await;
        }
    }

    async fn read(&self) -> Result<String, SourceError> {
        let path = self.path.clone();
        let read = spawn_blocking(move || -> io::Result<String> {
            let mut text = String::new();
            fs::File::open(path)?.take(BYTES_MAX as u64 + 1).read_to_string(&mut text)?;
            Ok(text)
        });
        let text = read.await.unwrap_or_else(|error| Err(error.into()));
        match text {
            Ok(text) if text.len() > BYTES_MAX => Err(SourceError::TooLarge { path: self.path.clone(), max: BYTES_MAX }),
            Ok(text) => Ok(text),
            Err(error) => Err(SourceError::Unreadable { path: self.path.clone(), error }),
        }
    }
}

#[cfg(test)]
mod tests {
    use tokio::sync::mpsc;

    use super::*;
    use crate::Readiness;

    /// One address a line; a line of its own says that the list is whole.
    fn parse(text: &str) -> Result<Vec<Endpoint<()>>, String> {
        let list = text.strip_suffix("end\n").ok_or("no end")?;
        let endpoint = |line: &str| Endpoint {
            address: line.to_owned(),
            identity: None,
            label: line.to_owned(),
            readiness: Readiness::Ready,
            options: (),
        };
        Ok(list.lines().map(endpoint).collect())
    }

    fn scratch(name: &str) -> PathBuf {
        std::env::temp_dir().join(format!("baton-discovery-{name}-{}", std::process::id()))
    }

    fn shown(answer: Answer<()>) -> String {
        match answer {
            Ok(endpoints) => endpoints.iter().map(|endpoint| endpoint.address.as_str()).collect::<Vec<_>>().join(" "),
            Err(error) => error.to_string().rsplit(": ").next().unwrap_or_default().to_owned(),
        }
    }

    #[tokio::test]
    async fn a_change_is_told_and_what_cannot_be_read_is_told_as_that() {
        let path = scratch("file");
        fs::write(&path, "a\nb\nend\n").unwrap();
        let (tell, mut told) = mpsc::unbounded_channel();
        let file = File { path: path.clone(), every: Duration::from_millis(1) };
        let watching = file.watch(parse, move |answer| tell.send(shown(answer)).unwrap());
        let script = async {
            assert_eq!(told.recv().await.unwrap(), "a b");
            fs::write(&path, "a\nb\nc\nend\n").unwrap();
            assert_eq!(told.recv().await.unwrap(), "a b c");
            fs::write(&path, "a\nb\n").unwrap();
            assert_eq!(told.recv().await.unwrap(), "no end", "and once: the next word is on the next change");
            fs::write(&path, "end\n").unwrap();
            assert_eq!(told.recv().await.unwrap(), "", "none at all, as it says");
            fs::remove_file(&path).unwrap();
            assert!(told.recv().await.unwrap().contains("No such file"));
            fs::write(&path, "end\n").unwrap();
            // It may have been looked for a few times before it was there.
            while told.recv().await.unwrap() != "" {}
        };
        tokio::select! {
            never = watching => match never {},
            () = script => {}
        }
        fs::remove_file(&path).unwrap();
    }

    #[tokio::test]
    async fn a_file_without_an_end_is_not_read_to_its_end() {
        let file = File { path: PathBuf::from("/dev/zero"), every: Duration::from_secs(1) };
        assert!(matches!(file.read().await, Err(SourceError::TooLarge { max: BYTES_MAX, .. })));
    }
}
