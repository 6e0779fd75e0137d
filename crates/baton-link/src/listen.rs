use std::{fmt::Display, sync::Arc, time::Duration};

use tokio::{sync::Semaphore, task::JoinSet};

use crate::{Listener, Stream};

/// After the system gave no connection, as when it has no more file descriptors: asking again at once would only take its time.
const AFTER_ERROR: Duration = Duration::from_millis(100);

/// Serves what connects, `connections_max` at a time, for ever; more wait to be accepted. `what` they are is for the log. All of it ends
/// when this is dropped.
pub async fn listen<S, F, E>(listener: impl Into<Listener>, what: &'static str, connections_max: usize, serve: S)
where
    S: Fn(Stream) -> F,
    F: Future<Output = Result<(), E>> + Send + 'static,
    E: Display + Send,
{
    let listener = listener.into();
    let places = Arc::new(Semaphore::new(connections_max));
    let mut connections = JoinSet::new();
    loop {
        let place = Arc::clone(&places).acquire_owned().await.expect("the semaphore is never closed");
        match listener.accept().await {
            Ok((stream, peer)) => {
                let served = serve(stream);
                connections.spawn(async move {
                    if let Err(error) = served.await {
                        tracing::info!(%peer, %error, what, "a connection ended");
                    }
                    drop(place);
                });
            }
            Err(error) => {
                tracing::warn!(%error, what, "a connection was not accepted");
                tokio::time::sleep(AFTER_ERROR).await;
            }
        }
        while connections.try_join_next().is_some() {}
    }
}
