/* Frames from the monitor, for as long as the page is open: the newest state, curves, causes, compared runs. It comes back by itself.
   The page of a report has its frames inside, and nothing comes any more. */

const AGAIN_MS = 5000;
const QUIET_MS = 6000;

export function follow(run, { on, trouble }) {
  const kept = document.getElementById("frames");
  if (kept) {
    for (const [kind, frame] of Object.entries(JSON.parse(kept.textContent))) on(kind, frame);
    return () => {};
  }
  let source = null, timer = null, heard = performance.now(), stopped = false;

  const open = () => {
    source = new EventSource(run ? `events?run=${encodeURIComponent(run)}` : "events");
    for (const kind of ["state", "curves", "causes", "compared"]) {
      source.addEventListener(kind, (event) => { heard = performance.now(); trouble(null); on(kind, JSON.parse(event.data)); });
    }
    source.addEventListener("end", () => again("The monitor has ended. Of a run in a folder, `atoll dashboard FOLDER` shows the same again."));
    source.addEventListener("error", () => { if (source.readyState === EventSource.CLOSED) again("The monitor does not answer, or serves as many viewers as it can. Trying again."); else trouble("The connection to the monitor is lost. Trying again."); });
  };
  const again = (why) => {
    source.close();
    trouble(why);
    clearTimeout(timer);
    if (!stopped) timer = setTimeout(open, AGAIN_MS);
  };
  const watch = setInterval(() => { if (source.readyState === EventSource.OPEN && performance.now() - heard > QUIET_MS) trouble("No news from the monitor for some seconds: what you see is old."); }, 1000);
  open();
  return () => { stopped = true; clearTimeout(timer); clearInterval(watch); source.close(); };
}
