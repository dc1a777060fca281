// Pages opened from a folder (file://) may not start a worker, and the search is one. There it
// runs in a hidden frame instead, which has the same two functions.
if (location.protocol === "file:") {
  window.Worker = class {
    constructor(url) {
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.body.append(frame)
      this.frame = frame
      const inner = frame.contentWindow
      inner.postMessage = (data) => setTimeout(() => this.onmessage?.({ data }))
      const script = inner.document.createElement("script")
      script.src = new URL(url, document.baseURI)
      this.ready = new Promise((resolve, reject) => {
        script.onload = () => resolve(inner)
        script.onerror = reject
      })
      this.ready.catch((error) => this.onerror?.(error))
      inner.document.body.append(script)
    }

    postMessage(data) {
      this.ready.then((inner) => inner.onmessage({ data }))
    }

    terminate() {
      this.frame.remove()
    }
  }
}
